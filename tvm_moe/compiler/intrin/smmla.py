"""AArch64 smmla: 2x2 int32 += 2 rows of 8 s8 times 2 columns of 8 s8; no saturation."""

from __future__ import annotations

from functools import cache

from tvm import tirx

from . import bfcvt, stream
from .dot import pairs

LANES = 2
round_to_bf16 = bfcvt.round_to_bf16


def multiply(sums: tirx.PrimExpr, rows: tirx.PrimExpr, columns: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.smmla.v4i32.v16i8", sums, rows, columns)


@cache
def tensor_intrin() -> str:
    return pairs("moe_mma_s8s8_2x2x8_smmla", 8, ("int8", "int32"), multiply)


def llvm_ir(mcpu: str) -> str:
    return stream.llvm_ir(mcpu) + bfcvt.llvm_ir(mcpu)
