"""AVX512-BF16 vdpbf16ps: 16 f32 lanes += 2 products each of one broadcast bf16 pair with 16 bf16 pairs.

TVM has no LLVM bfloat type: operands travel as uint16, and an always-inlined LLVM function casts them.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx

from .dot import dot

LANES = 16
FUNCTION = "moe_dpbf16ps_512"


def multiply(sums: tirx.PrimExpr, pair: tirx.PrimExpr, pairs: tirx.PrimExpr) -> tirx.PrimExpr:
    same = tirx.Broadcast(tirx.reinterpret("int32", pair), LANES)
    return tirx.call_pure_extern("float32x16", FUNCTION, sums, same, tirx.reinterpret("int32x16", pairs))


@cache
def tensor_intrin() -> str:
    return dot("moe_dot_bf16_16x2_avx512bf16", LANES, 2, ("uint16", "uint16", "float32"), multiply)


def llvm_ir(mcpu: str) -> str:
    return f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @{FUNCTION}(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) #0 {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
attributes #0 = {{ alwaysinline "target-cpu"="{mcpu}" }}
"""
