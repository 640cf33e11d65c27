"""vpmaddwd: int32 lanes += 2 products each of one broadcast s16 pair with as many s8 pairs, exact; two registers at a time.

Weights are sign-extended as they are loaded. (vpmaddubsw, which takes bytes as they are, saturates at 16 bits.) The broadcast
is an instruction of its own, loaded again for every two registers: where LLVM knows that they are the same, it keeps one for
each row and runs out of the 16 that AVX2 has.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx

from .dot import dot

LANES, REGISTERS = 16, 2
FUNCTION = "moe_pmaddwd_pairs"
INSTRUCTION = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}  # of so many sums


@cache
def tensor_intrin(lanes: int = LANES) -> str:
    def multiply(sums: tirx.PrimExpr, pair: tirx.PrimExpr, pairs: tirx.PrimExpr) -> tirx.PrimExpr:
        at = tirx.address_of(tirx.BufferLoad(pair.source, [pair.indices[0].base]))
        return tirx.call_pure_extern(f"int32x{lanes}", FUNCTION, sums, at, pairs)

    return dot(f"moe_dot_s16s8_{lanes}x2_pmaddwd", lanes, 2, ("int16", "int8", "int32"), multiply)


def llvm_ir(mcpu: str, lanes: int = LANES) -> str:
    n = lanes // REGISTERS
    sums, pairs, name = f"<{n} x i32>", f"<{lanes} x i16>", INSTRUCTION[n]
    low, high = (", ".join(f"i32 {i}" for i in range(first, first + lanes)) for first in (0, lanes))
    return f"""
declare {sums} @{name}({pairs}, {pairs})
define <{lanes} x i32> @{FUNCTION}(<{lanes} x i32> %c, ptr %x, <{2 * lanes} x i8> %w) #0 {{
  %same = call {sums} asm sideeffect "vpbroadcastd $1, $0", "=v,*m"(ptr elementtype(i32) %x) #1
  %pair = bitcast {sums} %same to {pairs}
  %wide = sext <{2 * lanes} x i8> %w to <{2 * lanes} x i16>
  %low = shufflevector <{2 * lanes} x i16> %wide, <{2 * lanes} x i16> poison, <{lanes} x i32> <{low}>
  %high = shufflevector <{2 * lanes} x i16> %wide, <{2 * lanes} x i16> poison, <{lanes} x i32> <{high}>
  %p0 = call {sums} @{name}({pairs} %low, {pairs} %pair)
  %p1 = call {sums} @{name}({pairs} %high, {pairs} %pair)
  %p = shufflevector {sums} %p0, {sums} %p1, <{lanes} x i32> <{low}>
  %s = add <{lanes} x i32> %c, %p
  ret <{lanes} x i32> %s
}}
attributes #0 = {{ alwaysinline "target-features"="{mcpu}" }}
attributes #1 = {{ nounwind willreturn memory(argmem: read, inaccessiblemem: readwrite) }}
"""
