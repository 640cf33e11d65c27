"""FMA: f32 lanes (8 on AVX2) += 2 products each of one broadcast bf16 pair with as many bf16 pairs, in order of k.

A bf16 is the upper half of an f32: the first of a pair is shifted up, the second is masked out. An empty asm statement after
each FMA keeps them in the order of this file: LLVM would take the first products of all vectors and then the second ones, and
run out of registers.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx

from .dot import dot

LANES = 8
HELD = 2
FUNCTION = "moe_fma_bf16_pairs"


@cache
def tensor_intrin(lanes: int = LANES) -> str:
    def multiply(sums: tirx.PrimExpr, pair: tirx.PrimExpr, pairs: tirx.PrimExpr) -> tirx.PrimExpr:
        same = tirx.Broadcast(tirx.reinterpret("int32", pair), lanes)
        return tirx.call_pure_extern(
            f"float32x{lanes}", FUNCTION, sums, same, tirx.reinterpret(f"int32x{lanes}", pairs)
        )

    return dot(f"moe_dot_bf16_{lanes}x2_fma", lanes, 2, ("uint16", "uint16", "float32"), multiply)


def llvm_ir(mcpu: str, lanes: int = LANES) -> str:
    floats, words = f"<{lanes} x float>", f"<{lanes} x i32>"
    return f"""
declare {floats} @llvm.fma.v{lanes}f32({floats}, {floats}, {floats})
define {floats} @{FUNCTION}({floats} %c, {words} %a, {words} %w) #0 {{
  %a0 = shl {words} %a, splat (i32 16)
  %w0 = shl {words} %w, splat (i32 16)
  %x0 = bitcast {words} %a0 to {floats}
  %y0 = bitcast {words} %w0 to {floats}
  %s0 = call {floats} @llvm.fma.v{lanes}f32({floats} %x0, {floats} %y0, {floats} %c)
  %t0 = call {floats} asm sideeffect "", "=v,0"({floats} %s0) #1
  %a1 = and {words} %a, splat (i32 -65536)
  %w1 = and {words} %w, splat (i32 -65536)
  %x1 = bitcast {words} %a1 to {floats}
  %y1 = bitcast {words} %w1 to {floats}
  %s1 = call {floats} @llvm.fma.v{lanes}f32({floats} %x1, {floats} %y1, {floats} %t0)
  %t1 = call {floats} asm sideeffect "", "=v,0"({floats} %s1) #1
  ret {floats} %t1
}}
attributes #0 = {{ alwaysinline "target-features"="{mcpu}" }}
attributes #1 = {{ nounwind willreturn memory(none) }}
"""
