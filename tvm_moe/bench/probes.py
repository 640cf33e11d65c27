"""The limits of this machine, by TVM-built probe kernels (compiler/probe): one small module a row of the kernel table."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from .. import isa, modules
from ..kernels import MicroKernel
from ..packing import advise_huge_pages
from ..runtime import Library
from .roofline import Limits
from .timing import Wake

PEAK_BYTES = 24 << 10  # panel and rows together, within the smallest L1
PEAK_SECONDS = 0.005
STEP = 512  # bytes a thread reads before it adds the next ones to the same accumulators


class Probe(Library):
    """The probe module of one row."""

    def __init__(self, kernel: MicroKernel) -> None:
        super().__init__(modules.find_probe(kernel), ("peak", "stream"))
        self.kernel = kernel
        self.repeats: int | None = None  # of the peak's loop, for a region of PEAK_SECONDS
        self.join_team()

    def peak(self, threads: int, repetitions: int = 5) -> float:
        """Operations a second of the row's full tile on a panel in L1: the best of some repetitions."""
        k = self.kernel
        row, column = k.group * k.activation_size, k.group * k.weight_size
        groups = PEAK_BYTES // (k.MR * row + k.NR * column) // k.depth * k.depth
        x, w = aligned(k.MR * groups * row), aligned(k.NR * groups * column)
        rows, sums = np.arange(k.MR, dtype=np.int32), aligned(threads * k.MR * k.NR * 4)
        operations = 2 * k.MR * k.NR * groups * k.group * threads

        def run(repeats: int) -> None:
            self.functions["peak"](*map(pointer, (x, w, rows, sums)), groups, repeats, threads)

        if self.repeats is None:  # once: a slow moment would make a region too short to measure
            self.repeats = max(1, int(20 * PEAK_SECONDS / min(seconds(partial(run, 20)) for _ in range(5))))
        return operations * self.repeats / min(seconds(partial(run, self.repeats)) for _ in range(repetitions))

    def bandwidth(self, data: np.ndarray, threads: int, repetitions: int = 5) -> float:
        """Bytes a second that all threads together read from ``data``: the best of some repetitions."""
        steps = data.nbytes // STEP // threads
        sums = aligned(threads * 64)

        def run() -> None:
            self.functions["stream"](pointer(data), pointer(sums), steps, threads)

        return steps * STEP * threads / min(seconds(run) for _ in range(repetitions))


class Probes:
    """The rows of some dtypes, and the buffer that the bandwidth probe reads (4 times the L3 at least)."""

    def __init__(self, dtypes: Iterable[str], level: str | None, l3_bytes: int, stream_bytes: int) -> None:
        self.rows = {dtype: Probe(isa.choose(dtype, level).kernel) for dtype in dtypes}
        self.data = aligned(max(stream_bytes, 4 * l3_bytes))
        self.wake = Wake()

    def measure(self, threads: int) -> Limits:
        """What the machine gives at this moment; the callers take turns with it and compare within a round."""
        reader = next(iter(self.rows.values()))
        self.wake()
        peaks = {dtype: probe.peak(threads, repetitions=1) for dtype, probe in self.rows.items()}
        return Limits(peaks, reader.bandwidth(self.data, threads, repetitions=1))


def aligned(size: int) -> np.ndarray:
    """``size`` zero bytes at a cache line, written once, so that they are pages of their own; huge ones, as layers have."""
    raw = np.empty(size + 64, np.uint8)
    advise_huge_pages(raw.ctypes.data, raw.nbytes)
    raw[:] = 0
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
