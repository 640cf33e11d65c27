"""AArch64 bfmmla: 2x2 f32 += 2 rows of 4 bf16 times 2 columns of 4 bf16.

TVM has no LLVM bfloat type: operands travel as uint16, and an always-inlined LLVM function casts them.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx

from . import bfcvt, stream
from .dot import pairs

LANES = 2
round_to_bf16 = bfcvt.round_to_bf16
FUNCTION = "moe_bfmmla"


def multiply(sums: tirx.PrimExpr, rows: tirx.PrimExpr, columns: tirx.PrimExpr) -> tirx.PrimExpr:
    cast = (tirx.reinterpret("int32x4", operand) for operand in (rows, columns))
    return tirx.call_pure_extern("float32x4", FUNCTION, sums, *cast)


@cache
def tensor_intrin() -> str:
    return pairs("moe_mma_bf16_2x2x4_bfmmla", 4, ("uint16", "float32"), multiply)


def llvm_ir(mcpu: str) -> str:
    return (
        stream.llvm_ir(mcpu)
        + bfcvt.llvm_ir(mcpu)
        + f"""
declare <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float>, <8 x bfloat>, <8 x bfloat>)
define <4 x float> @{FUNCTION}(<4 x float> %c, <4 x i32> %a, <4 x i32> %b) #0 {{
  %x = bitcast <4 x i32> %a to <8 x bfloat>
  %y = bitcast <4 x i32> %b to <8 x bfloat>
  %r = call <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float> %c, <8 x bfloat> %x, <8 x bfloat> %y)
  ret <4 x float> %r
}}
attributes #0 = {{ alwaysinline "target-features"="{mcpu}" }}
"""
    )
