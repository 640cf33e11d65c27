"""AVX2 vpmaddwd: 8 int32 lanes += 4 products each of one broadcast s8 quad with 8 s8 quads, exact.

Even and odd bytes are sign-extended to 16 bits where they lie, and each half is multiplied and added in pairs: no sum of two
products of 8-bit numbers overflows. (vpmaddubsw, which takes bytes as they are, saturates at 16 bits.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tvm import tirx

from .dot import dot

LANES = 8
HELD = 2
EIGHT = tirx.Broadcast(tirx.const(8, "int16"), 2 * LANES)


def even(words: tirx.PrimExpr) -> tirx.PrimExpr:
    return (words << EIGHT) >> EIGHT


def odd(words: tirx.PrimExpr) -> tirx.PrimExpr:
    return words >> EIGHT


def multiply(sums: tirx.PrimExpr, quad: tirx.PrimExpr, quads: tirx.PrimExpr) -> tirx.PrimExpr:
    same = tirx.reinterpret("int16x16", tirx.Broadcast(tirx.reinterpret("int32", quad), LANES))
    words = tirx.reinterpret("int16x16", quads)

    def products(half: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> tirx.PrimExpr:
        return tirx.call_llvm_pure_intrin("int32x8", "llvm.x86.avx2.pmadd.wd", half(words), half(same))

    return sums + products(even) + products(odd)


@cache
def tensor_intrin() -> str:
    return dot("moe_dot_s8s8_8x4_pmaddwd", LANES, 4, ("int8", "int8", "int32"), multiply)


def llvm_ir(mcpu: str) -> str:
    return ""
