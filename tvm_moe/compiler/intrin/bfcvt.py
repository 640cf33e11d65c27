"""AArch64 bfcvtn: f32 rounded to bf16 as hardware does it, half to even, NaN quiet.

An op of ours stands for it until loops are vectorized, because TVM vectorizes no call of a function. It is then lowered to
the LLVM function of its width, in which LLVM finds the instruction.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx
from tvm.ir import register_op_attr
from tvm.tirx.expr import CallEffectKind

OP = "tirx.moe_round_to_bf16"
WIDTHS = (8, 32)  # of the schedules' vectors of results, besides scalars


@cache
def register() -> None:
    register_op_attr(OP, "TVectorizable", True)
    register_op_attr(OP, "TCallEffectKind", CallEffectKind.Pure.value)
    tirx.register_intrin_lowering(OP, target="llvm", f=lowered)


def lowered(call: tirx.Call) -> tirx.PrimExpr:
    return tirx.call_pure_extern(str(call.ty), f"moe_round_to_bf16_{call.ty}", call.args[0])


def round_to_bf16(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """The bits, like `compute.f32_to_bf16`."""
    register()
    return tirx.call_intrin("uint16", OP, value)


def rounding(suffix: str, of: str) -> str:
    """The function of a width: ``of`` turns a scalar LLVM type into that of its operands."""
    single, half, bits = (of.format(kind) for kind in ("float", "bfloat", "i16"))
    return f"""
define {bits} @moe_round_to_bf16_uint16{suffix}({single} %value) #2 {{
  %rounded = fptrunc {single} %value to {half}
  %bits = bitcast {half} %rounded to {bits}
  ret {bits} %bits
}}"""


def llvm_ir(mcpu: str) -> str:
    functions = [rounding("", "{}"), *(rounding(f"x{width}", f"<{width} x {{}}>") for width in WIDTHS)]
    return "".join(functions) + f'\nattributes #2 = {{ alwaysinline "target-features"="{mcpu}" }}\n'
