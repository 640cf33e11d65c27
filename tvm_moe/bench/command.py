"""``tvm-moe bench``: from its options to tables and data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import kernels, models, modules
from ..errors import MoEError
from . import beside, overheads, packing, report, routing, run, simulate
from . import plot as plots
from .costs import Costs
from .options import BESIDE_TOKENS, QUICK_BUDGET, QUICK_ROUNDS, QUICK_TOKENS, SIMULATED_TOKENS, TOKENS, Options, shape

DEFAULT_MODEL = "qwen3-30b-a3b"


def parse(
    *, model: Iterable[str], shapes: Iterable[str], dtype: Iterable[str], tokens: Iterable[str], routings: Iterable[str],
    peers: Iterable[str], threads: int | None, isa: str | None, quick: bool, pack: bool, overheads: bool,
    plot: Path | None, beside_torch: bool, arm_instructions: bool, simulate_threads: Iterable[str],
    simulate_costs: str | None,
) -> Options:  # fmt: skip
    """Lists come as given: repeated, or with commas."""
    own = tuple(shape(text) for text in shapes)
    names = split(model) or (() if own else (DEFAULT_MODEL,))
    simulated = numbers("--simulate-threads", simulate_threads)
    cells_only = {"peers": peers, "pack": pack, "overheads": overheads, "plot": plot}
    layers = {
        "model": model,
        "shape": shapes,
        "tokens": tokens,
        "routing": routings,
        "threads": threads,
        "quick": quick,
    }
    if arm_instructions:
        alone("--arm-instructions", **cells_only, **layers, beside_torch=beside_torch, simulate_threads=simulated)
    elif simulated:
        alone("--simulate-threads", **cells_only, beside_torch=beside_torch, threads=threads, quick=quick)
    elif beside_torch:
        alone("--beside-torch", **cells_only)
    if not simulated and simulate_costs is not None:
        raise MoEError("--simulate-costs belongs to --simulate-threads N,...; give both or neither")
    if plot is not None:
        plots.check(plot)
    options = Options(
        shapes=own + tuple(models.find(name) for name in names),
        tokens=numbers("--tokens", tokens) or default_tokens(bool(simulated), beside_torch, quick),
        routings=tuple(routing.check(name) for name in split(routings))
        or (routing.ROUTINGS if simulated else ("uniform",)),
        peers=split(peers),
        threads=threads,
        isa=isa,
        pack=pack,
        overheads=overheads,
        beside_torch=beside_torch,
        arm_instructions=arm_instructions,
        simulate_threads=simulated,
        costs=Costs.parse(simulate_costs or ""),
    )
    if chosen := split(dtype) or (kernels.dtypes_of(isa) if arm_instructions else ()):
        options = replace(options, dtypes=chosen)
    if quick:
        options = replace(options, budget=QUICK_BUDGET, fewest_rounds=QUICK_ROUNDS)
    return options


def default_tokens(simulated: bool, beside_torch: bool, quick: bool) -> tuple[int, ...]:
    if simulated:
        return SIMULATED_TOKENS
    return BESIDE_TOKENS if beside_torch else QUICK_TOKENS if quick else TOKENS


def bench(options: Options, to_stderr: bool) -> dict[str, Any]:
    """Runs, prints the tables, and returns everything as JSON data."""
    with Console(stderr=True).status("starting") as status:
        made = measured(options, status.update)
    report.show(made, Console(stderr=to_stderr))
    return made


def measured(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    if options.arm_instructions:
        modules.require_compiler("building AArch64 modules")
        from . import arm  # needs the compiler

        return arm.run(options, say)
    if options.simulate_threads:
        return simulate.run(options, say)
    if options.beside_torch:
        return beside.run(options, say)
    made = run.run(options, say)
    count = made["threads"]
    if options.pack:
        say("packing")
        made["packing"] = [
            row for s in options.shapes for row in packing.measure(s, options.dtypes, count, options.isa)
        ]
    if options.overheads:
        say("fixed costs")
        made["overheads"] = overheads.measure(options.dtypes, count, options.isa)
    return made


def alone(option: str, **others: Any) -> None:
    """``option`` takes the place of the usual measurement, and ``others`` with it."""
    if given := [f"--{name.replace('_', '-')}" for name, value in others.items() if value]:
        raise MoEError(f"{option} takes the place of the measurement that {given[0]} belongs to; leave one of them out")


def split(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def numbers(option: str, values: Iterable[str]) -> tuple[int, ...]:
    parts = [part.strip() for value in values for part in value.split(",")]
    if wrong := [part for part in parts if not part.isdecimal()]:
        raise MoEError(f"{option} has {wrong[0]!r}, expected numbers such as 1,16,64")
    return tuple(map(int, parts))
