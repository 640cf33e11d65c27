"""AVX512-VNNI vpdpbusd: 16 int32 lanes += 4 products each of one broadcast u8 quad with 16 s8 quads; no saturation."""

from __future__ import annotations

from functools import cache

from tvm import tirx

from .dot import dot

LANES = 16


def multiply(sums: tirx.PrimExpr, quad: tirx.PrimExpr, quads: tirx.PrimExpr) -> tirx.PrimExpr:
    """This LLVM declares the operands as i8x64; TVM's own VNNI intrinsic (int32 operands) does not verify with it."""
    same = tirx.reinterpret("uint8x64", tirx.Broadcast(tirx.reinterpret("int32", quad), LANES))
    return tirx.call_llvm_pure_intrin("int32x16", "llvm.x86.avx512.vpdpbusd.512", sums, same, quads)


@cache
def tensor_intrin() -> str:
    return dot("moe_dot_u8s8_16x4_vnni", LANES, 4, ("uint8", "int8", "int32"), multiply)


def llvm_ir(mcpu: str) -> str:
    return ""
