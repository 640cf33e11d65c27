"""What `tvm-moe run` shows: progress while it packs, a table, and the same as plain data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tvm_moe

from . import checkpoint
from .run import NORM_BOUND, TOKEN_BOUND, LayerResult
from .run import run as run_layers

TABLE_WIDTH = 124
HEADINGS = (
    "layer",
    "dtype",
    "ISA",
    "error",
    "cosine",
    "worst token",
    "deviation",
    "ms",
    "GOPS",
    "GB/s",
    "eager ms",
    "speedup",
)


def run(
    path: Path,
    layers: Sequence[int] | None,
    dtype: str | None,
    tokens: int,
    isa: str | None,
    threads: int | None,
    to_stderr: bool,
) -> dict[str, Any]:
    """Runs, prints the table, and returns everything as JSON data; ``passed`` is False where a bound was exceeded."""
    if threads is not None:
        tvm_moe.set_num_threads(threads)  # first: it refuses numbers on which torch would crash
        torch.set_num_threads(threads)
    load = os.getloadavg()[0]  # before this run adds its own
    opened = checkpoint.open(path)
    wanted = opened.layers if layers is None else layers
    experts = sum(opened.layer(index).num_experts for index in wanted)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("packing and running", total=experts)
        results = list(
            run_layers(opened, wanted, dtype=dtype, tokens=tokens, isa=isa, progress=lambda *_: bar.advance(task))
        )
    wide_console(to_stderr).print(table(results, f"{path} ({opened.model_type}), {tokens} tokens", load))
    return {
        "checkpoint": str(path),
        "model_type": opened.model_type,
        "tokens": tokens,
        "threads": tvm_moe.get_num_threads(),
        "load": load,
        "bounds": {"deviation": NORM_BOUND, "worst_token": TOKEN_BOUND},
        "passed": all(result.passed for result in results),
        "layers": [{**asdict(result), "passed": result.passed} for result in results],
    }


def wide_console(to_stderr: bool) -> Console:
    """A console no narrower than the table: rich would drop figures to fit 80 columns, a wrapped line loses none."""
    console = Console(stderr=to_stderr)
    console.width = max(console.width, TABLE_WIDTH)
    return console


def table(results: Sequence[LayerResult], title: str, load: float) -> Table:
    """One line a layer; ``load`` is the load average before the run."""
    caption = (
        "error, cosine, worst token: of the layer against f32. deviation: of the routed experts against the reference "
        f"that rounds as they do, at most {NORM_BOUND:.2%}, {TOKEN_BOUND:.2%} in one token. Times: routed experts, "
        "medians; eager: torch in bf16, expert by expert."
    )
    if load > (cpus := len(os.sched_getaffinity(0))):
        caption += f"\nThe machine was busy (load {load:.1f} on {cpus} CPUs): the times, eager's above all, say little."
    made = Table(title=title, caption=caption, caption_justify="left")
    for heading in HEADINGS:
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        made.add_row(*_cells(result), style=None if result.passed else "bold red")
    return made


def _cells(r: LayerResult) -> list[str]:
    return [
        str(r.layer),
        r.dtype,
        r.isa,
        f"{r.accuracy.error:.2%}",
        f"{r.accuracy.cosine:.6f}",
        f"#{r.accuracy.worst_token} {r.accuracy.worst_error:.2%}",
        f"{r.deviation.error:.3%}" + ("" if r.passed else " FAILED"),
        f"{r.milliseconds:.3g}",
        f"{r.gops:.0f}",
        f"{r.gigabytes_per_second:.1f}",
        f"{r.eager_milliseconds:.3g}",
        f"{r.eager_milliseconds / r.milliseconds:.1f}x",
    ]
