"""MoE models of Hugging Face transformers (>= 5) with our experts.

``prepare_(model)`` packs every MoE layer in place, ``unprepare_`` takes it back, ``load_int8`` loads an INT8 checkpoint
with its experts packed as stored. ``enable()`` alone registers the name "tvm_moe" among transformers' experts
implementations, which packs each layer when it first runs.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "enable": "experts",
    "prepare_": "prepare",
    "unprepare_": "prepare",
    "load_int8": "int8",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
