"""AVX2 with FMA: 8 f32 lanes += 2 products each of one broadcast bf16 pair with 8 bf16 pairs, in order of k.

A bf16 is the upper half of an f32: the first of a pair is shifted up, the second is masked out. An empty asm statement after
each FMA keeps them in the order of this file: LLVM would take the first products of all vectors and then the second ones, and
run out of the 16 registers.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx

from .dot import dot

LANES = 8
HELD = 2
FUNCTION = "moe_fma_bf16_pairs"


def multiply(sums: tirx.PrimExpr, pair: tirx.PrimExpr, pairs: tirx.PrimExpr) -> tirx.PrimExpr:
    same = tirx.Broadcast(tirx.reinterpret("int32", pair), LANES)
    return tirx.call_pure_extern("float32x8", FUNCTION, sums, same, tirx.reinterpret("int32x8", pairs))


@cache
def tensor_intrin() -> str:
    return dot("moe_dot_bf16_8x2_fma", LANES, 2, ("uint16", "uint16", "float32"), multiply)


def llvm_ir(mcpu: str) -> str:
    constant = "<" + ", ".join(["i32 {0}"] * LANES) + ">"
    sixteen, upper = constant.format(16), constant.format(-65536)
    return f"""
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
define <8 x float> @{FUNCTION}(<8 x float> %c, <8 x i32> %a, <8 x i32> %w) #0 {{
  %a0 = shl <8 x i32> %a, {sixteen}
  %w0 = shl <8 x i32> %w, {sixteen}
  %x0 = bitcast <8 x i32> %a0 to <8 x float>
  %y0 = bitcast <8 x i32> %w0 to <8 x float>
  %s0 = call <8 x float> @llvm.fma.v8f32(<8 x float> %x0, <8 x float> %y0, <8 x float> %c)
  %t0 = call <8 x float> asm sideeffect "", "=x,0"(<8 x float> %s0) #1
  %a1 = and <8 x i32> %a, {upper}
  %w1 = and <8 x i32> %w, {upper}
  %x1 = bitcast <8 x i32> %a1 to <8 x float>
  %y1 = bitcast <8 x i32> %w1 to <8 x float>
  %s1 = call <8 x float> @llvm.fma.v8f32(<8 x float> %x1, <8 x float> %y1, <8 x float> %t0)
  %t1 = call <8 x float> asm sideeffect "", "=x,0"(<8 x float> %s1) #1
  ret <8 x float> %t1
}}
attributes #0 = {{ alwaysinline "target-features"="{mcpu}" }}
attributes #1 = {{ nounwind willreturn memory(none) }}
"""
