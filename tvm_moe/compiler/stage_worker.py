"""The process that times tuning tasks: a trial that crashes or hangs takes only this with it."""

from __future__ import annotations

import ctypes
import signal
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch  # noqa: F401  (its OpenMP team is what a layer runs on)

from ..runtime import Library
from .stage import ROW_SETS, WEIGHT_BYTES, Task

TOKENS = 64


def end_with_parent() -> None:
    """Linux: a tuner that is killed takes its worker with it, which would wait for work forever."""
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@lru_cache(maxsize=1)
def weights() -> np.ndarray:
    """Random bytes, valid in both dtypes for timing: exponents of bf16 stay small (no NaN, no denormal result)."""
    block = np.random.default_rng(0).integers(0, 63, 1 << 20, dtype=np.uint8)
    return np.tile(block, (WEIGHT_BYTES >> 20) + 33)


@lru_cache(maxsize=4)
def arrays(task: Task, threads: int) -> list[np.ndarray]:
    """x, rows, start, acc of a task; x in the operand's storage, row ids drawn from 64 tokens."""
    kernel, rng = task.kernel, np.random.default_rng(1)
    x = rng.integers(0, 63, TOKENS * task.groups * kernel.group * kernel.activation_size, dtype=np.uint8)
    rows = rng.integers(0, TOKENS, (ROW_SETS, task.block_rows), dtype=np.int32)
    acc = np.zeros((threads, 2, task.block_rows + kernel.row_group, kernel.NR), np.int32)
    return [x, rows, np.zeros(kernel.NR, np.int32), acc]


def seconds(paths: list[str], task: Task, threads: int, passes: int) -> list[list[float]]:
    """Of each module, the seconds of ``passes`` passes over the weights; modules take turns, after a warm-up pass each."""
    libraries = [Library(Path(path), ("stage",)) for path in paths]
    x, rows, start, acc = (a.ctypes.data for a in arrays(task, threads))
    w = weights().ctypes.data
    taken: list[list[float]] = [[] for _ in paths]
    for i in range(passes + 1):
        for j, library in enumerate(libraries):
            library.join_team()
            begin = time.perf_counter()
            library.functions["stage"](*map(ctypes.c_void_p, (x, w, rows, start, acc)), task.panels, threads)
            if i:
                taken[j].append(time.perf_counter() - begin)
    return taken
