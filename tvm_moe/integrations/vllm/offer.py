"""Our experts classes in the lists that vLLM chooses from."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import int8, unquantized

from .experts import TVMMoEBF16Experts, TVMMoEInt8Experts


def offer(first: bool = False) -> None:
    """By default BF16 comes before vLLM's portable vector kernel, after those for matrix instructions; INT8 comes last."""
    insert(unquantized, unquantized.UnquantizedMoeBackend.CPU, TVMMoEBF16Experts, CPUUnquantizedExperts, first)
    insert(int8, int8.Int8MoeBackend.CPU, TVMMoEInt8Experts, None, first)


def insert(oracle: ModuleType, backend: Any, ours: type, before: type | None, first: bool) -> None:
    """``ours`` into the list of ``backend``, once per process; last where ``before`` is not in it."""
    theirs = oracle.backend_to_kernel_cls
    if hasattr(theirs, "tvm_moe"):
        return

    @wraps(theirs)
    def backend_to_kernel_cls(asked: Any) -> list[type]:
        classes = list(theirs(asked))
        if asked is backend:
            at = 0 if first else classes.index(before) if before in classes else len(classes)
            classes.insert(at, ours)
        return classes

    backend_to_kernel_cls.tvm_moe = ours  # type: ignore[attr-defined]
    oracle.backend_to_kernel_cls = backend_to_kernel_cls  # type: ignore[attr-defined]
