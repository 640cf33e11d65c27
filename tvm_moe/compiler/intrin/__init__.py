"""Matrix instructions as TensorIntrins: one file per instruction family, found by the table's `intrinsic` name.

A family module offers ``LANES``, the columns one instruction serves, ``tensor_intrin() -> str``, which registers its
description and implementation once and returns the name to tensorize with, and ``llvm_ir(mcpu) -> str``: LLVM text the
kernel imports ("" where none is needed). Where an operand is widened and then takes more than one register, ``HELD`` says how
many; where the sums of LANES columns do, ``REGISTERS``. Where the CPUs round f32 to bf16 by an instruction,
``round_to_bf16(value)`` does. `dot` makes the description and implementation.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from tvm import tirx
from tvm.ir import StringImm


def family(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def with_llvm(func: tirx.PrimFunc, text: str) -> tirx.PrimFunc:
    """``func`` with LLVM text that is linked into its module ("": as it is)."""
    if not text:
        return func
    return func.with_body(tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", StringImm(text), func.body))
