"""AVX-VNNI vpdpbusd on 256 bits: 8 int32 lanes += 4 products each of one broadcast u8 quad with 8 s8 quads; no saturation."""

from __future__ import annotations

from functools import cache

from tvm import tirx

from .dot import dot

LANES = 8


def multiply(sums: tirx.PrimExpr, quad: tirx.PrimExpr, quads: tirx.PrimExpr) -> tirx.PrimExpr:
    """LLVM has one name for both encodings; without AVX-512 it takes VEX."""
    same = tirx.reinterpret("uint8x32", tirx.Broadcast(tirx.reinterpret("int32", quad), LANES))
    return tirx.call_llvm_pure_intrin("int32x8", "llvm.x86.avx512.vpdpbusd.256", sums, same, quads)


@cache
def tensor_intrin() -> str:
    return dot("moe_dot_u8s8_8x4_avxvnni", LANES, 4, ("uint8", "int8", "int32"), multiply)


def llvm_ir(mcpu: str) -> str:
    return ""
