"""AVX-VNNI-INT8 vpdpbssd: 8 int32 lanes += 4 products each of one broadcast s8 quad with 8 s8 quads; no shift needed."""

from __future__ import annotations

from functools import cache

from .dot import quads

LANES = 8


@cache
def tensor_intrin() -> str:
    return quads("moe_dot_s8s8_8x4_avxvnniint8", LANES, ("int8", "int8"), "llvm.x86.avx2.vpdpbssd.256")


def llvm_ir(mcpu: str) -> str:
    return ""
