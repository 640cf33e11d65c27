"""AArch64 bfcvtn: f32 rounded to bf16 by hardware, NaN quieted, as an op of ours.

TVM vectorizes no call of an LLVM function, but ops that say so. Lowered after that, the op becomes the function of its width.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx
from tvm.ir import register_op_attr
from tvm.tirx.expr import CallEffectKind

OP = "tirx.moe_round_to_bf16"
WIDTHS = (1, 2, 4, 8, 16, 32)


@cache
def register() -> None:
    register_op_attr(OP, "TVectorizable", True)
    register_op_attr(OP, "TCallEffectKind", CallEffectKind.Pure.value)
    tirx.register_intrin_lowering(OP, target="llvm", f=lowered)


def lowered(call: tirx.Call) -> tirx.PrimExpr:
    kind = str(call.ty)
    return tirx.call_pure_extern(kind, f"moe_bfcvt_{kind.partition('x')[2] or 1}", call.args[0])


def round_to_bf16(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """As uint16, like `compute.f32_to_bf16`."""
    register()
    return tirx.call_intrin("uint16", OP, value)


def convert(width: int) -> str:
    return f"""
define <{width} x i16> @moe_bfcvt_{width}(<{width} x float> %x) #1 {{
  %rounded = fptrunc <{width} x float> %x to <{width} x bfloat>
  %bits = bitcast <{width} x bfloat> %rounded to <{width} x i16>
  ret <{width} x i16> %bits
}}""" if width > 1 else """
define i16 @moe_bfcvt_1(float %x) #1 {
  %rounded = fptrunc float %x to bfloat
  %bits = bitcast bfloat %rounded to i16
  ret i16 %bits
}"""


def llvm_ir() -> str:
    return "".join(map(convert, WIDTHS))
