"""AArch64 sdot: 4 int32 lanes += 4 products each of one broadcast s8 quad with 4 s8 quads; no saturation."""

from __future__ import annotations

from functools import cache

from tvm import tirx

from .dot import dot

LANES = 4


def multiply(sums: tirx.PrimExpr, quad: tirx.PrimExpr, quads: tirx.PrimExpr) -> tirx.PrimExpr:
    same = tirx.reinterpret("int8x16", tirx.Broadcast(tirx.reinterpret("int32", quad), LANES))
    return tirx.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", sums, same, quads)


@cache
def tensor_intrin() -> str:
    return dot("moe_dot_s8s8_4x4_sdot", LANES, 4, ("int8", "int8", "int32"), multiply)


def llvm_ir(mcpu: str) -> str:
    return ""
