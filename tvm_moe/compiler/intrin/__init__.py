"""Matrix instructions as TensorIntrins: one file per instruction family, found by the table's `intrinsic` name.

A family module offers ``LANES``, the columns one instruction serves, ``tensor_intrin() -> str``, which registers its
description and implementation once and returns the name to tensorize with, and ``llvm_ir(mcpu) -> str``: LLVM text the
kernel imports ("" where none is needed). `dot` makes the description and implementation.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def family(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
