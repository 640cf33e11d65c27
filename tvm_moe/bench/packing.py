"""How fast a layer is packed and how much memory that takes, in a process of its own.

New memory must be cleared by the system first, which costs up to half of the time: a second figure packs into memory that
the process already has, and a plain parallel copy of the source into new memory stands beside the first.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tvm_moe

from .. import isa as levels
from .. import runtime, threads
from ..errors import ModuleError
from ..models import LayerShape
from ..packing import allocate
from .layers import Source
from .probes import Probe
from .timing import Spread

CASES = (("bf16", "bf16"), ("bf16", "int8"), ("int8", "int8"))  # source, packed
ROUNDS = 5
STATUS = Path("/proc/self/status")


def measure(shape: LayerShape, dtypes: tuple[str, ...], count: int, isa: str | None) -> list[dict[str, Any]]:
    """A row for each source and packed dtype."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        jobs = [(shape, source, packed, count, isa) for source, packed in CASES if packed in dtypes]
        return [pool.apply(case, job) for job in jobs]


def case(shape: LayerShape, source: str, packed: str, count: int, isa: str | None) -> dict[str, Any]:
    """Seconds of `pack_experts`, and the peak of resident memory above the source and the packed layer."""
    torch.set_num_threads(count)
    threads.set_num_threads(count)
    runtime.load(levels.choose(packed, isa).kernel)
    weights = Source(shape, source).stacked()
    options = {"dtype": packed, "activation": shape.activation, "isa": isa}
    times, extra, size = [], 0, 0
    for _ in range(ROUNDS):
        before = reset_peak()
        start = time.perf_counter()
        experts = tvm_moe.pack_experts(**weights, **options)
        times.append(time.perf_counter() - start)
        size = experts.nbytes
        extra = max(extra, peak() - before - size)
        del experts
    read = sum(w.nbytes for w in weights.values())
    copied = [seconds(copy, weights) for _ in range(ROUNDS)]
    bandwidth = read_bandwidth(packed, isa, weights["w13"], count)
    keep_freed_memory()
    tvm_moe.pack_experts(**weights, **options)
    again = [seconds(tvm_moe.pack_experts, **weights, **options) for _ in range(ROUNDS)]
    spread = Spread.of(times)
    return {
        "model": shape.name, "source": source, "packed": packed, "seconds": spread.median, "least_seconds": spread.least,
        "gbs": (read + size) / spread.median / 1e9, "reused_gbs": (read + size) / Spread.of(again).median / 1e9,
        "copy_gbs": 2 * read / Spread.of(copied).median / 1e9, "read_gbs": bandwidth and bandwidth / 1e9,
        "packed_bytes": size, "extra_bytes": extra, "expert_bytes": Source(shape, packed).expert_bytes,
    }  # fmt: skip


def seconds(call: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    start = time.perf_counter()
    result = call(*arguments, **options)
    taken = time.perf_counter() - start
    del result  # given back after the clock has stopped
    return taken


def copy(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The source into new memory like the packed layer's."""
    return [allocate(tuple(w.shape), w.dtype, zero=False).copy_(w) for w in weights.values()]


def read_bandwidth(packed: str, isa: str | None, source: torch.Tensor, count: int) -> float | None:
    """Bytes a second that the threads together read from the source, as the benchmark's roofline measures it."""
    try:
        probe = Probe(levels.choose(packed, isa).kernel)
    except ModuleError:
        return None
    return probe.bandwidth(source.view(-1).view(torch.uint8).numpy(), count)


def keep_freed_memory() -> None:
    """Tell glibc's allocator to keep what is freed from now on: the next layer finds its pages mapped."""
    if sys.platform == "linux":
        libc, trim, mmap = ctypes.CDLL(None), -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        for option in (trim, mmap):
            libc.mallopt(option, 2**31 - 1)


def reset_peak() -> int:
    """Resident bytes now, from where the peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10
