"""`tvm-moe run` on tiny checkpoints: what it reports, and what makes it fail."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import tvm_moe
from tvm_moe import checkpoint, cli, run

from . import tiny_models
from .test_checkpoint_int8 import compress


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    path = tmp_path_factory.mktemp("bf16")
    tiny_models.make("qwen3_moe").save_pretrained(path)
    return path


@pytest.fixture
def invoke(monkeypatch):
    """Runs the command; timing, which no test reads, is one call."""
    monkeypatch.setattr(run, "median_seconds", lambda *calls: [call() is None or 1.0 for call in calls])
    return lambda *args: CliRunner().invoke(cli.app, ["run", *map(str, args)])


def results(outcome, code=0):
    assert outcome.exit_code == code, outcome.output
    return json.loads(outcome.stdout)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_every_model(name, tmp_path, invoke):
    tiny_models.make(name).save_pretrained(tmp_path)
    report = results(invoke(tmp_path, "--tokens", 9, "--json"))
    assert [layer["layer"] for layer in report["layers"]] == checkpoint.open(tmp_path).layers
    for layer in report["layers"]:
        assert layer["dtype"] == "bf16"
        # The intermediate and the output are rounded to bf16, shared experts at each of their five steps: 2^-8 each.
        assert 0 < layer["accuracy"]["error"] < 7 * 2**-8
        assert layer["accuracy"]["cosine"] > 0.999


@pytest.mark.parametrize("stored", [True, False])
def test_int8(stored, tmp_path, invoke):
    tiny_models.make("mixtral").save_pretrained(tmp_path)
    if stored:
        compress(tmp_path)
    report = results(invoke(tmp_path, *([] if stored else ["--dtype", "int8"]), "--json", "-"))
    for layer in report["layers"]:
        assert layer["dtype"] == "int8"
        # It shows what quantization costs: far more than bf16 would, far less than 1.
        assert 2**-8 < layer["accuracy"]["error"] < 0.1
        assert layer["deviation"]["error"] < 2**-8


def test_layers_tokens_threads_and_file(bf16, tmp_path, invoke):
    before, file = torch.get_num_threads(), tmp_path / "out.json"
    try:
        outcome = invoke(bf16, "--layers", "1", "--tokens", 3, "--threads", 5, "--isa", "generic", "--json", file)
    finally:
        torch.set_num_threads(before)
        tvm_moe.set_num_threads(None)
    assert outcome.exit_code == 0, outcome.output
    assert "worst token" in outcome.stdout
    report = json.loads(file.read_text())
    assert (report["tokens"], report["threads"]) == (3, 5)
    assert [(layer["layer"], layer["isa"]) for layer in report["layers"]] == [(1, "generic")]


@pytest.mark.parametrize(("load", "said"), [(0.0, False), (1e6, True)])
def test_a_busy_machine_is_said(load, said, bf16, invoke, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0, 0))
    outcome = invoke(bf16, "--layers", "0")
    assert ("The machine was busy (load" in outcome.stdout) == said


def test_one_wrong_token_fails(bf16, invoke, monkeypatch):
    right = tvm_moe.fused_moe

    def wrong(*args):
        out = right(*args)
        out[5] *= 1.02
        return out

    monkeypatch.setattr(tvm_moe, "fused_moe", wrong)
    report = results(invoke(bf16, "--layers", "0", "--json"), code=1)
    (layer,) = report["layers"]
    assert not report["passed"]
    assert layer["deviation"]["worst_token"] == 5
    assert layer["deviation"]["error"] < run.NORM_BOUND  # the bound for one token is what finds it


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: out.index_fill(1, torch.tensor([31]), 0),  # a column is missing
        lambda out: out * 1.006,  # everything is a little wrong, no token by much
    ],
)
def test_damage_everywhere_fails(damage, bf16, invoke, monkeypatch):
    right = tvm_moe.fused_moe
    monkeypatch.setattr(tvm_moe, "fused_moe", lambda *args: damage(right(*args).float()))
    results(invoke(bf16, "--layers", "0", "--json"), code=1)


def test_nan_fails_and_is_null(bf16, invoke, monkeypatch):
    right = tvm_moe.fused_moe
    monkeypatch.setattr(tvm_moe, "fused_moe", lambda *args: right(*args) * float("nan"))
    report = results(invoke(bf16, "--layers", "0", "--json"), code=1)
    assert report["layers"][0]["accuracy"]["error"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["absent"], "absent: no such checkpoint folder"),
        (["{bf16}", "--layers", "7"], "layer 7 has no experts; those that have: [0, 1]"),
        (["{bf16}", "--layers", "a"], "--layers is 'a', expected numbers and ranges"),
        (["{bf16}", "--isa", "pentium"], "pentium"),
        (["{bf16}", "--json", "{bf16}/no/such/file"], "cannot be written (No such file or directory)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, bf16, invoke):
    outcome = invoke(*(arg.format(bf16=bf16) for arg in args))
    assert outcome.exit_code == 2
    last = outcome.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in outcome.output


def test_int8_cannot_be_run_as_bf16(tmp_path, invoke):
    tiny_models.make("mixtral").save_pretrained(tmp_path)
    compress(tmp_path)
    assert invoke(tmp_path, "--dtype", "bf16").exit_code == 2


def test_progress_counts_every_expert(bf16):
    seen = []
    reader = checkpoint.open(bf16).layer(1)
    reader.pack(None, "generic", seen.append)
    assert seen == list(range(6))
