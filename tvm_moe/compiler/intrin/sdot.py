"""AArch64 sdot: 4 int32 lanes += 4 products each of one broadcast s8 quad with 4 s8 quads; no saturation."""

from __future__ import annotations

from functools import cache

from .dot import quads

LANES = 4


@cache
def tensor_intrin() -> str:
    return quads("moe_dot_s8s8_4x4_sdot", LANES, ("int8", "int8"), "llvm.aarch64.neon.sdot.v4i32.v16i8")


def llvm_ir(mcpu: str) -> str:
    return ""
