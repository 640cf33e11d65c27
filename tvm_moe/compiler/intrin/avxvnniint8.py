"""AVX-VNNI-INT8 vpdpbssd: 8 int32 lanes += 4 products each of one broadcast s8 quad with 8 s8 quads; no shift needed."""

from __future__ import annotations

from functools import cache

from tvm import tirx

from .dot import dot

LANES = 8


def multiply(sums: tirx.PrimExpr, quad: tirx.PrimExpr, quads: tirx.PrimExpr) -> tirx.PrimExpr:
    same = tirx.reinterpret("int8x32", tirx.Broadcast(tirx.reinterpret("int32", quad), LANES))
    return tirx.call_llvm_pure_intrin("int32x8", "llvm.x86.avx2.vpdpbssd.256", sums, same, quads)


@cache
def tensor_intrin() -> str:
    return dot("moe_dot_s8s8_8x4_avxvnniint8", LANES, 4, ("int8", "int8", "int32"), multiply)


def llvm_ir(mcpu: str) -> str:
    return ""
