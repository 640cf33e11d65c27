"""A layer between two matrix products of torch, all on the same threads: does one slow the other down?

One process runs loops in turns: products alone, layers alone, and product, layer, product, as around an attention
projection. In all of them the team is warm, and weights take turns beyond L3: a product that finds its matrix in cache
only while it runs alone would seem to suffer from the layer.

A short product is slower after anything but a product: its code and constants have left the caches (0.15 ms; a tiny product
in between takes that upon itself). The control is a product after torch's own reading of memory, `torch.sum`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from .. import isa, modules, threads
from ..models import LayerShape
from . import machine, peers
from .fleet import Entry, arrange
from .layers import Source, layers_in_rotation
from .options import Options
from .remote import environment
from .routing import Workload
from .run import MEMORY_SHARE, Say
from .timing import rounds
from .worker import Host, Job

GOAL = 1.05
PASSES = 6  # of a loop; the first one warms up
LOOPS = {
    "matmul": ("matmul",),
    "layer": ("layer",),
    "sequence": ("before", "layer", "after"),
    "torch": ("sum", "control"),
}
# part -> the loop it is in, and the loop that runs the same alone
COMPARED = {
    "before": ("sequence", "matmul"),
    "layer": ("sequence", "layer"),
    "after": ("sequence", "matmul"),
    "control": ("torch", "matmul"),
}


class Parts:
    """What the loops consist of: calls of layers, and products of the hidden states with BF16 matrices [2H, H]."""

    def __init__(self, job: Job, matrices: int, read_bytes: int) -> None:
        H = job.shape.H
        self.read = torch.ones(read_bytes >> 2)
        self.host = Host(job)
        self.matrices = itertools.cycle([(torch.randn(2 * H, H) / H**0.5).bfloat16() for _ in range(matrices)])

    @torch.inference_mode()
    def loop(self, name: str, workload: Workload, i: int) -> dict[str, float]:
        """Seconds of each part, medians over the passes; all have the i-th routing."""
        hidden, inputs = workload.hidden(self.host.shape), self.host.inputs[workload][i]
        self.host.wake()
        passes = [[self.seconds(part, hidden, inputs) for part in LOOPS[name]] for _ in range(PASSES)]
        return dict(zip(LOOPS[name], map(statistics.median, zip(*passes[1:], strict=True)), strict=True))

    def seconds(self, part: str, hidden: torch.Tensor, inputs: tuple[Any, ...]) -> float:
        call: Callable[[], Any]
        if part == "layer":
            call = partial(self.host.adapter.run, next(self.host.layers), inputs)
        elif part == "sum":
            call = self.read.sum
        else:
            call = partial(linear, hidden, next(self.matrices))
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def turns(self, workload: Workload, budget: float, fewest: int) -> dict[str, list[dict[str, float]]]:
        """What each loop gave, round by round."""
        made: dict[str, list[dict[str, float]]] = {name: [] for name in LOOPS}

        def call(name: str, i: int) -> float:
            start = time.perf_counter()
            made[name].append(self.loop(name, workload, i))
            return time.perf_counter() - start

        self.host.prepare(workload)
        counted = rounds(tuple(LOOPS), call, budget, fewest)
        self.host.forget()
        return {name: times[-len(counted[name]) :] for name, times in made.items()}


def row(job: Job, workload: Workload, made: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """One row of the result; ratios are medians of those within a round."""
    parts = {}
    for part, (loop, twin) in COMPARED.items():
        alone, among = [r[twin] for r in made[twin]], [r[part] for r in made[loop]]
        parts[part] = {
            "alone_ms": statistics.median(alone) * 1e3, "in_sequence_ms": statistics.median(among) * 1e3,
            "ratio": statistics.median(b / a for a, b in zip(alone, among, strict=True)),
        }  # fmt: skip
    return {
        "model": job.shape.name, "tokens": workload.tokens, "routing": workload.routing, "dtype": job.dtype,
        "threads": job.threads, "openmp": openmp(), "rounds": len(made["layer"]), "parts": parts,
    }  # fmt: skip


def openmp() -> str:
    """File name of the library whose team runs both."""
    address = threads.team() or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return Path(name).name
    return "none"


def measure(job: Job, matrices: int, options: Options) -> list[dict[str, Any]]:
    """The rows of one layer, in a process of its own."""
    parts = Parts(job, matrices, options.rotation_bytes)
    return [
        row(job, workload, parts.turns(workload, options.budget, options.fewest_rounds))
        for workload in (Workload(tokens, routing) for routing in options.routings for tokens in options.tokens)
    ]


def run(options: Options, say: Say = lambda _: None) -> dict[str, Any]:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        threads.set_num_threads(options.threads)
    made = machine.header(options, threads.get_num_threads()) | {"beside": []}
    for shape, dtype in itertools.product(options.shapes, options.dtypes):
        say(f"{shape.name}: {dtype} between products of torch")
        modules.find(isa.choose(dtype, options.isa).kernel)
        layer(options, shape, dtype, made)
    made["load"]["after"] = machine.load()
    return made


def layer(options: Options, shape: LayerShape, dtype: str, made: dict[str, Any]) -> None:
    """Add the rows of one layer, or why there are none."""
    size, l3 = Source(shape, dtype).nbytes, made["machine"]["l3_bytes"]
    wanted = layers_in_rotation(size, l3, options.rotation_bytes)
    available = int(MEMORY_SHARE * machine.memory("MemAvailable"))
    groups, _ = arrange([Entry(peers.OURS, dtype)], {dtype: wanted}, {dtype: size}, available)
    if not groups:
        reason = f"a layer of {size / 2**30:.1f} GiB does not fit memory"
        made["absent"].append({"model": shape.name, "side": peers.OURS.name, "dtype": dtype, "reason": reason})
        return
    job = Job(peers.OURS.name, shape, dtype, groups[0].most, made["threads"], options.isa)
    matrices = layers_in_rotation(2 * shape.H * shape.H * 2, l3, options.rotation_bytes)
    with (
        environment({"OMP_NUM_THREADS": str(job.threads)}),
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
    ):
        made["beside"] += pool.apply(measure, (job, matrices, options))
