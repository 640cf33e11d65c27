"""The tables of what is not a cell: packing, fixed costs, layers between matmuls, simulated schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from . import beside
from .costs import Costs
from .simulate import GOAL

Data = dict[str, Any]


def extras(report: Data) -> Iterator[Table]:
    """Those of a result that it has something for."""
    if report.get("packing"):
        yield packing_table(report["packing"])
    if report.get("overheads"):
        yield overheads_table(report["overheads"])
    if report.get("beside"):
        yield beside_table(report["beside"])
    if report.get("arm_instructions"):
        yield arm_table(report["arm_instructions"])
    rows = report.get("simulation", [])
    for model in dict.fromkeys(row["model"] for row in rows):
        yield simulation_table(report, [row for row in rows if row["model"] == model])


def packing_table(rows: list[Data]) -> Table:
    caption = (
        "GB/s: source read and packed layer written, into new memory, and into memory the process already had.\n"
        "copy: a plain copy of the source into new memory. read: reading the source."
    )
    table = Table(title="packing a layer", caption=caption, caption_justify="left")
    names = (
        "model",
        "source",
        "packed",
        "s",
        "GB/s",
        "reused",
        "copy",
        "read",
        "packed MiB",
        "extra MiB",
        "expert MiB",
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        speeds = (row[name] and f"{row[name]:.1f}" for name in ("gbs", "reused_gbs", "copy_gbs", "read_gbs"))
        sizes = (f"{row[name] / 2**20:.1f}" for name in ("packed_bytes", "extra_bytes", "expert_bytes"))
        table.add_row(row["model"], row["source"], row["packed"], f"{row['seconds']:.3g}", *speeds, *sizes)
    return table


def overheads_table(overheads: dict[str, Data]) -> Table:
    caption = (
        "import: of tvm_moe after torch. detect: what the CPU executes. load: choose a level and load its prebuilt module.\n"
        "calls: of a layer with H 64, I 32, E 2, k 1; of one token also by the compiled function alone, by a module, by the\n"
        "operator (gradients on)."
    )
    table = Table(title="fixed costs", caption=caption, caption_justify="left")
    columns = {
        "import ms": "import_ms", "detect ms": "detect_ms", "load ms": "load_ms", "first call ms": "first_call_ms",
        "T = 0 call us": "empty_call_us", "T = 1 call us": "one_token_us", "compiled us": "compiled_us",
        "module us": "module_us", "operator us": "operator_us",
    }  # fmt: skip
    for name in ("dtype", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for dtype, row in overheads.items():
        table.add_row(dtype, *(f"{row[name]:.3g}" for name in columns.values()))
    return table


def beside_table(rows: list[Data]) -> Table:
    """A column a part: alone, among the others, and how many times as long that is."""
    caption = (
        "ms alone / in the sequence matmul, layer, matmul: times as long (medians; of the ratios in a round).\n"
        "control: a matmul that follows torch.sum instead of the layer.\n"
        f"OpenMP: {', '.join(dict.fromkeys(row['openmp'] for row in rows))}, {rows[0]['threads']} threads."
    )
    table = Table(title="a layer between two matmuls of torch", caption=caption, caption_justify="left")
    for name in ("model", "tokens", "dtype", "before", "layer", "after", "control"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        tokens = f"{row['tokens']}" + f" {row['routing']}" * (row["routing"] != "uniform")
        table.add_row(row["model"], tokens, row["dtype"], *(compared(part) for part in row["parts"].values()))
    return table


def compared(part: Data) -> str:
    text = f"{part['alone_ms']:.3g} / {part['in_sequence_ms']:.3g}: {part['ratio']:.2f}x"
    return f"[bold red]{text}[/]" if part["ratio"] > beside.GOAL else text


def arm_table(rows: list[Data]) -> Table:
    """A line a token count; classes across."""
    caption = (
        "One call, one thread, E 8, H 1024, I 512, k 2, SiLU, under qemu-user -cpu max. Executed instructions in thousands.\n"
        "needed: products (smmla, bfmmla) without padding; one row alone fills half of each.\n"
        "vLLM: its own AArch64 layer, release 0.32, counted in the same way once, not now; of it: our instructions over its."
    )
    table = Table(title="AArch64 instructions", caption=caption, caption_justify="left")
    classes = [name for name in rows[0]["executed"] if any(row["executed"][name] for row in rows)]
    for name in ("dtype", "tokens", *classes, "needed", "vLLM", "of it"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = [*(row["executed"][name] for name in classes), row["needed_products"], row["vllm"]]
        table.add_row(row["dtype"], str(row["tokens"]), *(f"{n / 1e3:,.0f}" for n in counts), f"{row['ratio']:.3f}x")
    return table


def simulation_table(report: Data, rows: list[Data]) -> Table:
    """Threads downwards, routing and dtype across: makespan over ideal."""
    caption = (
        f"makespan / (all work / threads); above {GOAL} with what threads lose most by. end: no tickets are left. Waits for\n"
        "prepare: hidden states, intermediate: of a block, ring_h: room for one, ring_y: room for results.\n"
        f"Costs of a thread: {Costs(**report['costs'])}. Kernels: {', '.join(report['kernels'].values())}."
    )
    table = Table(title=f"{rows[0]['model']}: simulated schedule", caption=caption, caption_justify="left")
    across = list(dict.fromkeys((row["routing"], row["dtype"]) for row in rows))
    for name in ("tokens", "threads", *map(" ".join, across)):
        table.add_column(name, justify="right", no_wrap=True)
    lines: dict[tuple[int, int], dict[tuple[str, str], str]] = {}
    for row in rows:
        lines.setdefault((row["tokens"], row["threads"]), {})[row["routing"], row["dtype"]] = ratio(row)
    for (tokens, threads), found in lines.items():
        table.add_row(f"{tokens}", f"{threads}", *(found[key] for key in across))
    return table


def ratio(row: Data) -> str:
    if row["ratio"] <= GOAL:
        return f"{row['ratio']:.3f}"
    return f"[bold red]{max(row['lost'], key=row['lost'].__getitem__)} {row['ratio']:.3f}[/]"
