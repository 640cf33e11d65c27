"""Matrix instructions as TensorIntrins: one file per instruction family, found by the table's `intrinsic` name.

A family module offers ``LANES``, the columns one instruction serves, ``tensor_intrin() -> str``, which registers its
description and implementation once and returns the name to tensorize with, and ``llvm_ir(mcpu) -> str``: LLVM text the
kernel imports ("" where none is needed). Where an operand is widened and then takes more than one register, ``HELD`` says how
many; where the sums of LANES columns do, ``REGISTERS``. Where threads must set registers up first, ``THREAD`` says how. Where
the CPUs round f32 to bf16 by an instruction, ``round_to_bf16(value)`` does. `dot` makes the description and implementation;
`tiles` those of AMX, of which there is one for each row count.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from tvm import tirx
from tvm.ir import StringImm
from tvm.script import tirx as T


def family(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


class ThreadState(NamedTuple):
    """Functions of the LLVM text by which a thread sets an instruction's registers up and gives them back ("": none).

    ``shape``: takes the rows of the tile that comes next, which is then computed for so many, not for whole row groups.
    """

    enter: str = ""
    leave: str = ""
    shape: str = ""
    llvm_ir: str = ""

    def entered(self) -> None:
        """In TVMScript: the thread that runs this statement sets them up."""
        call(self.enter)

    def left(self) -> None:
        call(self.leave)

    def shaped(self, rows: tirx.PrimExpr) -> None:
        call(self.shape, rows)


def call(name: str, *arguments: tirx.PrimExpr) -> None:
    if name:
        T.evaluate(tirx.call_extern("int32", name, *arguments))


def thread_state(name: str | None) -> ThreadState:
    """What threads do before and after they run tiles of the intrinsic."""
    return getattr(family(name), "THREAD", ThreadState()) if name else ThreadState()


def with_llvm(func: tirx.PrimFunc, text: str) -> tirx.PrimFunc:
    """``func`` with LLVM text that is linked into its module ("": as it is)."""
    if not text:
        return func
    return func.with_body(tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", StringImm(text), func.body))
