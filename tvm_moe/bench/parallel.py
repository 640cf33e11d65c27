"""A layer over several processes of this machine: ``python -m tvm_moe.bench.parallel``.

Every side computes the same batch. For "all_to_all" and "all_reduce" each rank has its share of the tokens, for "replicated"
and "tensor" all of them; "one process" has all experts, and as many threads as the ranks together.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import api, models, threads
from ..cli import Dtype
from ..parallel import EXCHANGES, ExpertParallelMoE, TensorParallelMoE
from . import machine
from .command import numbers
from .layers import Source
from .routing import Workload
from .timing import Spread, rotated

OWN_TOKENS = ("all_to_all", "all_reduce")
ALONE = "one process"


@dataclass(frozen=True)
class Options:
    """What a run is asked for; ``tokens`` of all ranks together, ``num_threads`` of each."""

    shape: models.LayerShape
    dtype: str
    ranks: int
    tokens: tuple[int, ...]
    num_threads: int
    rounds: int


class Sides:
    """Every way to compute the batch, by name, as this rank calls it."""

    def __init__(self, options: Options) -> None:
        weights = Source(options.shape, options.dtype)
        stacked = weights.stacked() | weights.options
        w13, w2 = stacked.pop("w13"), stacked.pop("w2")
        self.options, self.rank = options, dist.get_rank()
        self.modules: dict[str, torch.nn.Module] = {
            name: ExpertParallelMoE.from_weights(w13, w2, exchange=name, **stacked) for name in EXCHANGES
        }
        self.modules["tensor"] = TensorParallelMoE.from_weights(w13, w2, **stacked)
        self.alone = api.pack_experts(w13, w2, **stacked) if self.rank == 0 else None

    @property
    def names(self) -> list[str]:
        return [ALONE, *self.modules]

    def part(self, name: str, *batch: Tensor) -> list[Tensor]:
        """Of hidden states, weights and ids, what this rank calls with."""
        n, ranks = len(batch[0]), self.options.ranks
        own = slice(self.rank * n // ranks, (self.rank + 1) * n // ranks) if name in OWN_TOKENS else slice(None)
        return [tensor[own] for tensor in batch]

    def call(self, name: str, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if name != ALONE:
            return self.modules[name](x, weights, ids)
        return x if self.alone is None else api.fused_moe(x, self.alone, weights, ids)

    def seconds(self, name: str, workload: Workload, i: int) -> float:
        """Of the ``i``-th call, from when all ranks begin to when the last one has its result."""
        batch = self.part(name, workload.hidden(self.options.shape), *workload.draw(self.options.shape, i))
        threads.set_num_threads(self.options.num_threads * (self.options.ranks if name == ALONE else 1))
        dist.barrier()
        start = time.perf_counter()
        self.call(name, *batch)
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def deviation(self, name: str, workload: Workload) -> float:
        """From one process, in norm, of the first rank's tokens."""
        batch = self.part(name, workload.hidden(self.options.shape), *workload.draw(self.options.shape, 0))
        got, want = self.call(name, *batch).double(), self.call(ALONE, *batch).double()
        return float((got - want).norm() / want.norm()) if self.rank == 0 and len(want) else 0.0


def serve(rank: int, options: Options, folder: str) -> None:
    """One process; the first writes what was measured."""
    torch.set_num_threads(options.num_threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    sides = Sides(options)
    cells = []
    for tokens in options.tokens:
        workload = Workload(tokens, "uniform")
        deviations = {name: sides.deviation(name, workload) for name in sides.names}
        times: dict[str, list[float]] = {name: [] for name in sides.names}
        for i in range(options.rounds):
            for name in rotated(sides.names, i):
                times[name].append(sides.seconds(name, workload, i))
        for name, seconds in times.items():
            spread = Spread.of([t * 1e3 for t in seconds])
            times_ms = {"ms": spread.median, "q1_ms": spread.q1, "q3_ms": spread.q3, "least_ms": spread.least}
            cells.append({"tokens": tokens, "side": name, **times_ms, "deviation": deviations[name]})
    if rank == 0:
        Path(folder, "cells.json").write_text(json.dumps(cells))
    dist.barrier()
    dist.destroy_process_group()


def run(options: Options) -> dict[str, Any]:
    """Starts the ranks; returns everything as JSON data."""
    before = machine.load()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(serve, (options, folder), nprocs=options.ranks)
        cells = json.loads(Path(folder, "cells.json").read_text())
    asked = {
        "shape": vars(options.shape), "dtype": options.dtype, "ranks": options.ranks, "threads": options.num_threads,
        "rounds": options.rounds,
    }  # fmt: skip
    return machine.stamp() | asked | {"load": [before, machine.load()], "cells": cells}


def table(report: dict[str, Any]) -> Table:
    """A row for each number of tokens, a column for each side."""
    shape, cells = report["shape"], report["cells"]
    title = (
        f"{shape['name']} with {shape['E']} experts, {report['dtype']}, {report['ranks']} ranks of {report['threads']} "
        f"threads: ms"
    )
    loads, off = (f"{load[0]:.1f}" for load in report["load"]), max(cell["deviation"] for cell in cells)
    caption = (
        f"Median (least) of {report['rounds']} calls; load {' to '.join(loads)}.\n"
        f"At most {off:.1g} off one process, in norm."
    )
    made = Table(title=title, caption=caption)
    for name in ("tokens", *dict.fromkeys(cell["side"] for cell in cells)):
        made.add_column(name, justify="right")
    for tokens in dict.fromkeys(cell["tokens"] for cell in cells):
        sides = [cell for cell in cells if cell["tokens"] == tokens]
        made.add_row(f"{tokens}", *(f"{c['ms']:.3g} ({c['least_ms']:.3g})" for c in sides))
    return made


def main(
    model: Annotated[str, typer.Option(help="One of `tvm_moe.models`.")] = "qwen3-30b-a3b",
    experts: Annotated[int, typer.Option(min=1, help="Of the model's, at most.")] = 32,
    dtype: Annotated[Dtype, typer.Option()] = Dtype.int8,
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    tokens: Annotated[str, typer.Option(help="Of all ranks together.")] = "1,16,256,1024",
    num_threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of a rank. Default: its share.")] = None,
    rounds: Annotated[int, typer.Option(min=2)] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results there.")] = None,
) -> None:
    """Expert parallelism by all_to_all and by all_reduce, and tensor parallelism, over processes of this machine."""
    shape = models.find(model)
    shape = replace(shape, E=min(experts, shape.E), k=min(experts, shape.k))
    share = num_threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    report = run(Options(shape, dtype.value, ranks, numbers("--tokens", [tokens]), share, rounds))
    Console().print(table(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
