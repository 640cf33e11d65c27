"""What `tvm-moe generate` shows: the text, and a table of speeds with the baseline beside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tvm_moe

from . import generate as generation


def run(
    model: str, dtype: str, prompt: str, *, threads: int | None, to_stderr: bool, held_out: Path | None = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Generate, print, and return everything as JSON data."""
    if threads is not None:
        tvm_moe.set_num_threads(threads)  # first: it refuses numbers on which torch would crash
        torch.set_num_threads(threads)
    load = os.getloadavg()[0]  # before this run adds its own
    found = generation.generate(model, dtype, prompt, held_out=held_out, **options)
    console = Console(stderr=to_stderr)
    console.print(found["packed"], highlight=False)
    console.print(Text(prompt, style="dim") + Text(found["sides"][0]["text"]))
    console.print(table(found, load))
    if len(found["sides"]) > 1:
        ours, theirs = found["sides"]
        console.print(agreement(ours["tokens"], theirs["tokens"], theirs["name"]))
    return found | {"threads": tvm_moe.get_num_threads(), "load": load}


def table(found: dict[str, Any], load: float) -> Table:
    """A line a side; ``load`` is the load average before the run."""
    made = Table(
        title=f"{found['model']}: prompt of {found['prompt_tokens']}, {found['new_tokens']} new tokens",
        caption=f"Medians of runs that took turns.\nLoad when it began: {load:.1f}",
        caption_justify="left",
    )
    headings = ["experts", "prefill, tokens/s", "decode, tokens/s", "time in experts"]
    bits = found["sides"][0]["bits_per_byte"] is not None
    for heading in headings + ["bits per byte"] * bits:
        made.add_column(heading, justify="right")
    for side in found["sides"]:
        ours = side["name"] == generation.OURS
        made.add_row(
            f"{side['name']} {found['dtype']}" if ours else f"{side['name']} bf16",
            f"{side['prefill']:.1f}",
            "" if side["decode"] is None else f"{side['decode']:.1f}",
            f"{side['experts']:.0%}",
            *([f"{side['bits_per_byte']:.4f}"] if bits else []),
        )
    return made


def agreement(ours: list[int], theirs: list[int], name: str) -> str:
    """Where two greedy texts part, if they do."""
    parted = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if parted is None:
        return f"The same {len(ours)} tokens as {name}."
    return f"The same tokens as {name} up to {parted} of {len(ours)}; from there on each follows its own text."
