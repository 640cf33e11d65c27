"""A layer between two matmuls of torch: what is compared with what. No test looks at how long anything takes."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tvm_moe.bench import beside, machine, report, run
from tvm_moe.bench.options import Options
from tvm_moe.bench.routing import Workload
from tvm_moe.bench.worker import Job
from tvm_moe.cli import app
from tvm_moe.models import LayerShape

TINY = LayerShape("tiny", 64, 32, 6, 2)
QUICK = Options((TINY,), tokens=(5,), budget=0, fewest_rounds=2, rotation_bytes=1 << 16, beside_torch=True)


def test_ratios_are_those_within_a_round():
    """The machine gave half in the second round, and a matmul after the layer takes a quarter longer."""
    made = {
        "matmul": [{"matmul": 1.0}, {"matmul": 2.0}, {"matmul": 1.0}],
        "layer": [{"layer": 4.0}, {"layer": 8.0}, {"layer": 4.0}],
        "sequence": [{"before": s, "layer": 4 * s, "after": 1.25 * s} for s in (1.0, 2.0, 1.0)],
        "torch": [{"sum": 3.0, "control": 1.5 * s} for s in (1.0, 2.0, 1.0)],
    }
    row = beside.row(Job("tvm_moe", TINY, "int8", 2, 3), Workload(7, "uniform"), made)
    assert (row["model"], row["tokens"], row["dtype"], row["threads"], row["rounds"]) == ("tiny", 7, "int8", 3, 3)
    assert {name: part["ratio"] for name, part in row["parts"].items()} == {
        "before": 1, "layer": 1, "after": 1.25, "control": 1.5,
    }  # fmt: skip
    assert row["parts"]["layer"] == {"alone_ms": 4000, "in_sequence_ms": 4000, "ratio": 1}


def test_a_whole_run():
    made = beside.run(QUICK)
    assert run.passed(made)
    assert json.loads(json.dumps(made, allow_nan=False))["cells"] == []
    assert [(row["tokens"], row["dtype"]) for row in made["beside"]] == [(5, "int8"), (5, "bf16")]
    for row in made["beside"]:
        assert set(row["parts"]) == set(beside.COMPARED)
        assert all(value > 0 for part in row["parts"].values() for value in part.values())
        assert row["openmp"] == beside.openmp()
        assert row["rounds"] == 2
    console = Console(file=io.StringIO())
    report.show(made, console)
    assert all(text in console.file.getvalue() for text in ("between two matmuls", "control", beside.openmp()))
    assert "peers" not in console.file.getvalue()


def test_a_layer_that_does_not_fit_memory_is_no_pass(monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda _: 1)
    made = beside.run(QUICK)
    assert not run.passed(made)
    assert {row["reason"] for row in made["absent"]} == {"a layer of 0.0 GiB does not fit memory"}


@pytest.mark.parametrize("other", [["--peers", "torch"], ["--pack"], ["--overheads"], ["--simulate-threads", "8"]])
def test_it_takes_the_place_of_cells(other):
    result = CliRunner().invoke(app, ["bench", "--beside-torch", *other])
    assert result.exit_code == 2
    assert "takes the place of the measurement that" in result.output
