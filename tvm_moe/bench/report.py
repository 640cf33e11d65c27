"""The tables of a result (see `run`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from . import tables
from .peers import OURS, PEERS

Data = dict[str, Any]
WIDTH = 150  # of a file; a terminal has its own
BUSY = 0.3  # load per core above which times are not to be trusted


def show(report: Data, console: Console) -> None:
    if not console.is_terminal:
        console.width = WIDTH
    timed = "machine" in report  # a simulation has none
    for line in preamble(report) if timed else ():
        console.print(line, highlight=False, markup=False)
    for model in dict.fromkeys(cell["model"] for cell in report["cells"]):
        console.print(cells_table([cell for cell in report["cells"] if cell["model"] == model]))
    for table in tables.extras(report):
        console.print(table)
    for line in remarks(report) if timed else ():
        console.print(line, highlight=False, markup=False)


def preamble(report: Data) -> Iterator[str]:
    machine = report["machine"]
    yield (
        f"{report['date']}  {machine['cpu']}, {machine['cores']} cores, L3 {machine['l3_bytes'] >> 20} MiB; "
        f"{report['threads']} threads; load before {describe_load(report['load']['before'])}"
    )
    yield ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    yield "kernels: " + ", ".join(report["kernels"].values())


def remarks(report: Data) -> Iterator[str]:
    """What is missing, and whether the machine was quiet."""
    yield from report["notes"]
    sides: dict[tuple[str, str, str], list[str]] = {}
    for row in report["absent"]:
        sides.setdefault((row["dtype"], row["model"], row["reason"]), []).append(row["side"])
    for (dtype, model, reason), names in sides.items():
        yield f"left out: {', '.join(names)} ({dtype}, {model}): {reason}"
    silent = [peer for peer in PEERS if peer not in report["peers"]]
    if silent and report["cells"]:
        yield f"peers not asked for: {', '.join(silent)} (--peers {','.join(silent)})"
    yield f"load after {describe_load(report['load']['after'])}"
    if busy(report):
        yield "the machine was busy when this run began: DO NOT TRUST ITS TIMES"


def busy(report: Data) -> bool:
    """Whether others had work for this machine when the run began."""
    return report["load"]["before"][0] > BUSY * report["machine"]["cores"]


def describe_load(load: tuple[float, ...]) -> str:
    return " ".join(f"{x:.2f}" for x in load)


def cells_table(cells: list[Data]) -> Table:
    """A section a cell: what the machine allows, then a line a side, ours first."""
    first = cells[0]
    shape = ", ".join(f"{n} {first[n]}" for n in "HIEk") + f", {first['activation']}" + ", bias" * first["bias"]
    caption = (
        "ms: median (quartiles). GOPS: useful operations. GB/s: touched weights. roofline: share of what peak and bandwidth "
        "allow, measured in the same rounds.\nratio: times as fast as that side we are, median over rounds. "
        "error: relative norm against f32 / its bound."
    )
    table = Table(title=f"{first['model']} ({shape})", caption=caption, caption_justify="left")
    for name in ("tokens", "dtype", "side", "ms", "GOPS", "GB/s", "roofline", "ratio", "error", ""):
        table.add_column(name, justify="left" if name in ("side", "") else "right", no_wrap=True)
    for cell in cells:
        table.add_row(*limit_line(cell), style="dim")
        for side in cell["sides"]:
            wrong = not (side["check"] and side["check"]["passed"])
            table.add_row("", "", *line(cell, side), style="bold red" if wrong else None)
        table.add_section()
    return table


def limit_line(cell: Data) -> list[str]:
    key = [f"{cell['tokens']}" + f" {cell['routing']}" * (cell["routing"] != "uniform"), cell["dtype"]]
    if cell["roofline_ms"] is None:
        return [*key, "limit", *["-"] * 6, ""]
    gops, gbs = (cell[name] / cell["roofline_ms"] / 1e6 for name in ("operations", "bytes"))
    figures = [
        f"{cell['roofline_ms']:.3g} ({cell['roofline_q1_ms']:.3g}-{cell['roofline_q3_ms']:.3g})",
        f"{gops:.0f}",
        f"{gbs:.1f}",
        "100%",
        "",
        "",
    ]
    return [*key, "limit", *figures, f"{cell['roofline_limit']}; {cell['touched_experts']:.3g} experts touched"]


def line(cell: Data, side: Data) -> list[str]:
    ratio, check = cell["ratio"].get(side["side"]), side["check"]
    return [
        side["side"],
        f"{side['ms']:.3g} ({side['q1_ms']:.3g}-{side['q3_ms']:.3g})",
        f"{side['gops']:.0f}",
        f"{side['gbs']:.1f}",
        "-" if side["roofline"] is None else f"{side['roofline']:.0%}",
        "" if ratio is None else f"{ratio:.2f}x",
        "?" if check is None else f"{check['error']:.2%} / {check['bound']:.2%}" + " WRONG" * (not check["passed"]),
        own_figures(cell) if side["side"] == OURS.name else "",
    ]


def own_figures(cell: Data) -> str:
    named = {"INT8 over BF16": "int8_over_bf16", "skew costs": "skew_cost"}
    return "; ".join(f"{name} {cell[key]:.2f}x" for name, key in named.items() if cell[key])
