"""How fast a layer is packed and how much memory that takes, in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

import tvm_moe

from .. import isa as levels
from .. import runtime, threads
from ..models import LayerShape
from .layers import Source
from .timing import Spread

CASES = (("bf16", "bf16"), ("bf16", "int8"), ("int8", "int8"))  # source, packed
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
    times, extra, size = [], 0, 0
    for _ in range(3):
        before = reset_peak()
        start = time.perf_counter()
        experts = tvm_moe.pack_experts(**weights, dtype=packed, activation=shape.activation, isa=isa)
        times.append(time.perf_counter() - start)
        size = experts.nbytes
        extra = max(extra, peak() - before - size)
        del experts
    moved = sum(w.nbytes for w in weights.values()) + size
    spread = Spread.of(times)
    return {
        "model": shape.name, "source": source, "packed": packed, "seconds": spread.median, "least_seconds": spread.least,
        "gbs": moved / spread.median / 1e9, "packed_bytes": size, "extra_bytes": extra,
        "expert_bytes": Source(shape, packed).expert_bytes,
    }  # fmt: skip


def reset_peak() -> int:
    """Resident bytes now, from where the peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10
