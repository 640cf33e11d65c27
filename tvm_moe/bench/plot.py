"""``--plot``: the cells of a result against the roofline, a panel for each model and dtype."""

from __future__ import annotations

import importlib.util
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoEError
from .peers import SIDES
from .report import busy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Data = dict[str, Any]
SUFFIXES = (".png", ".svg", ".pdf")
PANEL = (6.0, 4.5)  # inches
ROOFLINE = "roofline"
STYLES: dict[str, dict[str, Any]] = {  # the same in all panels and pictures; ours is the one filled circle
    side.name: {"color": f"C{i}", "marker": "osD^v<>*"[i % 8], "markerfacecolor": f"C{i}" if i == 0 else "none"}
    for i, side in enumerate(SIDES)
}


def check(file: Path) -> None:
    """Raise what would otherwise fail when a long run has ended."""
    if file.suffix.lower() not in SUFFIXES:
        raise MoEError(f"--plot {file}: expected a name that ends in one of {', '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise MoEError(f"--plot {file}: there is no folder {file.parent}; make it, or give another file")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise MoEError(f"--plot {file}: cannot be written; give another file")
    if importlib.util.find_spec("matplotlib") is None:
        raise MoEError("--plot needs matplotlib: pip install 'tvm_moe[plot]' (scripts/bench does so itself)")


def draw(report: Data, file: Path) -> None:
    """Write the picture of a result to ``file``, whose suffix says what it is."""
    from matplotlib.figure import Figure  # without pyplot: no window, no state that a caller's own plots share

    cells = report["cells"]
    if not cells:
        raise MoEError(f"--plot {file}: no layer was measured, so there is nothing to draw; see what was left out")
    models, dtypes = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("model", "dtype"))
    figure = Figure((PANEL[0] * len(dtypes), PANEL[1] * len(models)), layout="constrained")
    axes = figure.subplots(len(models), len(dtypes), squeeze=False)
    legend: dict[str, Any] = {}
    for at, model, dtype in ((axes[i, j], m, d) for i, m in enumerate(models) for j, d in enumerate(dtypes)):
        panel(at, [c for c in cells if (c["model"], c["dtype"]) == (model, dtype)], roof(cells, dtype))
        at.set_title(f"{model}, {dtype.upper()}")
        legend |= {label: handle for handle, label in zip(*at.get_legend_handles_labels(), strict=True)}
    labels = sorted(legend, key=[*STYLES, ROOFLINE].index)
    figure.legend([legend[label] for label in labels], labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(title(report, models))
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise MoEError(f"--plot {file}: cannot be written ({error.strerror}); give another file") from None


def title(report: Data, models: list[str]) -> str:
    belongs = f"{report['date'][:10]}, {report['machine']['cpu']}, {report['threads']} threads"
    return f"{', '.join(models)}\n{belongs}" + ", A BUSY MACHINE" * busy(report)


def roof(cells: list[Data], dtype: str) -> tuple[float, float] | None:
    """Peak (GOPS) of a dtype and bandwidth (GB/s) of the run, medians over cells; None where no probe could run."""
    peaks = [cell["peak_gops"] for cell in cells if cell["dtype"] == dtype and cell["peak_gops"]]
    bandwidths = [cell["bandwidth_gbs"] for cell in cells if cell["bandwidth_gbs"]]
    return (statistics.median(peaks), statistics.median(bandwidths)) if peaks else None


def panel(axes: Axes, cells: list[Data], roof: tuple[float, float] | None) -> None:
    """Points of all sides, with token counts at the highest ones, under the roofline."""
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of touched weights", ylabel="GOPS")
    axes.grid(which="both", alpha=0.2)
    axes.margins(y=0.12)  # room for the counts
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        x = cell["operations"] / cell["bytes"]
        for side in cell["sides"]:
            points.setdefault(side["side"], []).append((x, side["gops"]))
        label = f"{cell['tokens']}" + f" {cell['routing']}" * (cell["routing"] != "uniform")
        if cell["sides"]:
            top = max(side["gops"] for side in cell["sides"])
            axes.annotate(label, (x, top), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    for name, found in points.items():
        axes.plot(*zip(*found, strict=True), linestyle="none", label=name, **STYLES[name])
    if roof and cells:
        axes.plot(*line(roof, [cell["operations"] / cell["bytes"] for cell in cells]), "k-", label=ROOFLINE)


def line(roof: tuple[float, float], intensities: list[float]) -> tuple[list[float], list[float]]:
    """Where the roofline begins, bends and ends, around all points and the bend."""
    peak, bandwidth = roof
    bend = peak / bandwidth
    xs = [min(*intensities, bend) / 2, bend, max(*intensities, bend) * 2]
    return xs, [min(peak, x * bandwidth) for x in xs]
