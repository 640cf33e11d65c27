"""The picture of a result: what is drawn where, and what is refused before a run begins."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tvm_moe.bench import command, plot
from tvm_moe.cli import app
from tvm_moe.errors import MoEError

ROOT = Path(__file__).parent.parent
drawn = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib (extra 'plot')")


def cell(tokens, dtype, model="some-model", routing="uniform", peak=400.0, sides=("tvm_moe", "torch")):
    made = {
        "model": model,
        "tokens": tokens,
        "routing": routing,
        "dtype": dtype,
        "operations": 64 * tokens,
        "bytes": 16,
    }
    figures = [{"side": side, "gops": 3.0 * tokens / (i + 1)} for i, side in enumerate(sides)]
    return made | {"peak_gops": peak, "bandwidth_gbs": peak and peak / 10, "sides": figures}


def report(*cells, load=0.1):
    return {
        "date": "2026-11-29T18:00:00+00:00", "machine": {"cpu": "Some CPU", "cores": 4}, "threads": 3,
        "load": {"before": (load, 0, 0)}, "cells": list(cells),
    }  # fmt: skip


@pytest.fixture
def figures(monkeypatch):
    """The figures that are made, to be looked at."""
    figure = pytest.importorskip("matplotlib.figure", reason="no matplotlib (extra 'plot')")
    made = []

    class Kept(figure.Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(figure, "Figure", Kept)
    return made


def test_a_panel_for_each_model_and_dtype(figures, tmp_path):
    cells = [cell(t, d, m) for m in ("one", "two") for d in ("int8", "bf16") for t in (1, 16)]
    cells[0] = cell(1, "int8", "one", sides=("torch", "tvm_moe"))  # the legend is in the order of the table of sides
    plot.draw(report(*cells, cell(4, "bf16", "two", "hot")), tmp_path / "made.png")
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == ["one, INT8", "one, BF16", "two, INT8", "two, BF16"]
    assert figure.get_suptitle() == "one, two\n2026-11-29, Some CPU, 3 threads"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["tvm_moe", "torch", "roofline"]
    assert {axes.get_xscale() + axes.get_yscale() for axes in figure.axes} == {"loglog"}
    assert [text.get_text() for text in figure.axes[3].texts] == ["1", "16", "4 hot"]


def test_a_picture_tells_that_the_machine_was_busy(figures, tmp_path):
    plot.draw(report(cell(1, "int8"), load=3.0), tmp_path / "made.png")
    assert figures[0].get_suptitle().endswith("3 threads, A BUSY MACHINE")


def test_points_and_the_line(figures, tmp_path):
    plot.draw(
        report(cell(1, "int8"), cell(16, "int8", peak=600.0), cell(16, "int8", peak=800.0)), tmp_path / "made.svg"
    )
    (axes,) = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["tvm_moe"] == [[4, 3], [64, 48], [64, 48]]
    assert lines["torch"] == [[4, 1.5], [64, 24], [64, 24]]
    assert lines["roofline"] == [[2, 120], [10, 600], [128, 600]]  # medians: 600 GOPS, 60 GB/s


def test_without_probes_there_is_no_line(figures, tmp_path):
    plot.draw(report(cell(1, "bf16", peak=None)), tmp_path / "made.pdf")
    assert [line.get_label() for line in figures[0].axes[0].lines] == ["tvm_moe", "torch"]


@drawn
@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_files(tmp_path, suffix, magic):
    file = tmp_path / f"made{suffix}"
    plot.check(file)
    plot.draw(report(cell(1, "int8")), file)
    assert file.read_bytes().startswith(magic)
    plot.check(file)  # it may be written again


@drawn
def test_nothing_measured(tmp_path):
    with pytest.raises(MoEError, match="no layer was measured"):
        plot.draw(report(), tmp_path / "made.png")


@pytest.mark.parametrize(
    ("name", "message"),
    [("made.jpg", "ends in one of .png"), ("made", "ends in one of .png"), ("none/made.png", "there is no folder")],
)
def test_refused_before_the_run(monkeypatch, tmp_path, name, message):
    monkeypatch.setattr(command, "bench", lambda *_, **__: pytest.fail("the benchmark runs"))
    result = CliRunner().invoke(app, ["bench", "--plot", str(tmp_path / name)])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1


def test_a_folder_is_not_a_file(tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(MoEError, match="cannot be written"):
        plot.check(tmp_path / "folder.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(command, "bench", lambda *_, **__: pytest.fail("the benchmark runs"))
    result = CliRunner().invoke(app, ["bench", "--plot", str(tmp_path / "made.png")])
    assert result.exit_code == 2
    assert "pip install 'tvm_moe[plot]'" in result.output


@pytest.mark.parametrize("other", [["--beside-torch"], ["--simulate-threads", "8"]])
def test_there_must_be_cells(tmp_path, other):
    result = CliRunner().invoke(app, ["bench", *other, "--plot", str(tmp_path / "made.png")])
    assert result.exit_code == 2
    assert "that --plot belongs to" in result.output


@drawn
def test_the_picture_comes_after_everything_else(monkeypatch, tmp_path):
    """What was measured is shown and written before anything can go wrong with the picture."""
    monkeypatch.setattr(command, "bench", lambda *_, **__: report() | {"absent": []})
    files = [tmp_path / name for name in ("made.json", "made.png")]
    result = CliRunner().invoke(app, ["bench", "--json", str(files[0]), "--plot", str(files[1])])
    assert result.exit_code == 2
    assert files[0].exists()
    assert not files[1].exists()


@pytest.mark.parametrize(
    ("arguments", "extras"),
    [([], "build"), (["--plot", "x.png"], "build plot"), (["--plot=x.png", "--quick"], "build plot")],
)
def test_the_script_installs_the_extra(tmp_path, arguments, extras):
    """A copy of scripts/bench beside a setup and a Python that only tell what they are asked for."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "scripts/bench").write_text((ROOT / "scripts/bench").read_text())
    for name in ("scripts/setup", ".venv/bin/python"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >&2\n')
    for name in ("scripts/bench", "scripts/setup", ".venv/bin/python"):
        os.chmod(tmp_path / name, 0o755)
    done = subprocess.run([tmp_path / "scripts/bench", *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[0] == f"scripts/setup {extras}"


def test_matplotlib_is_only_loaded_to_draw():
    code = "import sys; from tvm_moe.bench import command; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
