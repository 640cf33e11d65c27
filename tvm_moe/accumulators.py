"""The sums that a module's tiles leave, against exact ones: numpy only, for CPUs that torch is not there for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .kernels import MicroKernel
from .runtime import Module


@dataclass(frozen=True)
class Check:
    """One line of the result: what ran, its error and the bound it must keep."""

    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN


def check_all_accumulators(module: Module, kernel: MicroKernel) -> Iterator[Check]:
    """Every row count of a tile, and a block of more than one."""
    for rows in range(1, kernel.MR + 2):
        yield check_accumulators(module, kernel, rows)


def check_accumulators(module: Module, kernel: MicroKernel, rows: int) -> Check:
    """The sums of ``rows`` gathered rows over two chunks of K: exact in INT8, within K roundings in BF16."""
    rng = np.random.default_rng(rows)
    groups, K = 37 * kernel.depth, 37 * kernel.k_step
    integer = kernel.dtype == "int8"
    if integer:
        x = rng.integers(-127, 128, (rows + 2, K), dtype=np.int64)
        w = rng.integers(-128, 128, (kernel.NR, K), dtype=np.int64)
        stored_x, stored_w = (x + kernel.offset).astype(kernel.activation), w.astype(np.int8)
        start = (-kernel.offset * w.sum(1)).astype(np.int32)
    else:
        stored_x, stored_w = (bf16_bits(rng.standard_normal(s)) for s in ((rows + 2, K), (kernel.NR, K)))
        x, w = from_bf16(stored_x), from_bf16(stored_w)
        start = np.zeros(kernel.NR, np.float32)
    packed = np.ascontiguousarray(stored_w.reshape(kernel.NR, groups, kernel.group).transpose(1, 0, 2))
    ids = rng.permutation(rows + 2)[:rows].astype(np.int32)
    acc = np.empty((rows, kernel.NR), start.dtype)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (stored_x, ids, packed, start, acc)]
    temp = room(kernel, rows, K)
    module.check_panel(
        rows, pointers[0], K, *pointers[1:], groups, 20 * kernel.depth, ctypes.c_void_p(temp.ctypes.data)
    )
    exact = x[ids] @ w.T
    error = float(np.abs(acc - exact).max())
    bound = 0.0 if integer else float((np.abs(x[ids]) @ np.abs(w).T).max()) * K * 2.0**-24
    return Check(f"accumulators, {rows} rows", error, bound)


def room(kernel: MicroKernel, rows: int, K: int) -> np.ndarray:
    """What `check_panel` needs of its caller: room for the rows and their sums, filled up to a row group."""
    return np.empty((rows + kernel.row_group) * (K * kernel.activation_size + kernel.NR * 4), np.uint8)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
