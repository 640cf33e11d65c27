"""``tvm-moe bench``: from its options to tables and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console

from .. import models
from . import overheads, packing, report, routing, run
from .options import QUICK_BUDGET, QUICK_ROUNDS, QUICK_TOKENS, TOKENS, Options, shape

DEFAULT_MODEL = "qwen3-30b-a3b"


def bench(
    model: Iterable[str], shapes: Iterable[str], dtype: Iterable[str], tokens: Iterable[str], routings: Iterable[str],
    peers: Iterable[str], threads: int | None, isa: str | None, quick: bool, pack: bool, overhead: bool, to_stderr: bool,
) -> dict[str, Any]:  # fmt: skip
    """Runs, prints the tables, and returns everything as JSON data. Lists come as given: repeated, or with commas."""
    own = tuple(shape(text) for text in shapes)
    names = split(model) or (() if own else (DEFAULT_MODEL,))
    options = Options(
        shapes=own + tuple(models.find(name) for name in names),
        tokens=numbers(tokens) or (QUICK_TOKENS if quick else TOKENS),
        routings=tuple(routing.check(name) for name in split(routings)) or ("uniform",),
        peers=split(peers),
        threads=threads,
        isa=isa,
    )
    if chosen := split(dtype):
        options = replace(options, dtypes=chosen)
    if quick:
        options = replace(options, budget=QUICK_BUDGET, fewest_rounds=QUICK_ROUNDS)
    with Console(stderr=True).status("starting") as status:
        made = measured(options, pack, overhead, status.update)
    report.show(made, Console(stderr=to_stderr))
    return made


def measured(options: Options, pack: bool, overhead: bool, say: Callable[[str], None]) -> dict[str, Any]:
    whole = run.Run(options, say)
    count = whole.threads
    made = whole.whole()
    if pack:
        say("packing")
        made["packing"] = [
            row for s in options.shapes for row in packing.measure(s, options.dtypes, count, options.isa)
        ]
    if overhead:
        say("fixed costs")
        made["overheads"] = overheads.measure(options.dtypes, count, options.isa)
    return made


def split(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def numbers(values: Iterable[str]) -> tuple[int, ...]:
    from ..errors import MoEError

    parts = split(values)
    if wrong := [part for part in parts if not part.isdigit()]:
        raise MoEError(f"--tokens has {wrong[0]!r}, expected numbers such as 1,16,64")
    return tuple(map(int, parts))
