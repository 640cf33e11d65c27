"""Fused Mixture-of-Experts layers for CPUs in INT8 and BF16, compiled by Apache TVM.

The public names are loaded on first use: ``import tvm_moe`` is cheap, and the core (`isa`, `kernels`, `runtime`)
imports without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "route": "routing",
    "pack_experts": "api",
    "pack_linear": "api",
    "fused_moe": "api",
    "FusedMoE": "layers",
    "ExpertParallelMoE": "parallel",
    "TensorParallelMoE": "parallel",
    "set_num_threads": "threads",
    "get_num_threads": "threads",
    "explain": "report",
    "PackedExperts": "experts",
    "MoEError": "errors",
    "CheckpointError": "errors",
    "UnsupportedISAError": "errors",
    "ModuleError": "errors",
    "SlowPathWarning": "errors",
}
__all__ = ["__version__", "reference", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in {"reference", "checkpoint"}:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
