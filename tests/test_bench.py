"""The benchmark runs, says what is missing, and computes what it reports. No test looks at how long anything takes."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from tvm_moe import reference
from tvm_moe.bench import cells, checks, machine, overheads, packages, peers, probes, report, run, tables
from tvm_moe.bench.fleet import Entry, arrange
from tvm_moe.bench.layers import Source, alternate, layers_in_rotation
from tvm_moe.bench.options import Options, shape
from tvm_moe.bench.remote import Remote, SideFailedError
from tvm_moe.bench.roofline import Limits, Roofline
from tvm_moe.bench.routing import Workload, draw
from tvm_moe.bench.timing import Spread, rounds
from tvm_moe.bench.worker import Job
from tvm_moe.cli import app
from tvm_moe.errors import ModuleError, MoEError
from tvm_moe.models import MODELS, LayerShape

TINY = LayerShape("tiny", 64, 32, 6, 2)
BIASED = LayerShape("biased", 64, 32, 4, 2, "swigluoai", bias=True)
QUICK = Options((TINY,), tokens=(5,), budget=0, fewest_rounds=2, rotation_bytes=1 << 16, stream_bytes=1 << 20)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "hot", "zipf-flat", "hot-flat"])
def test_routing_draws_distinct_experts(routing):
    ids = draw(routing, 40, 16, 4, rng())
    assert ids.shape == (40, 4)
    assert ids.dtype == torch.int32
    assert ids.min() >= 0
    assert ids.max() < 16
    assert all(len(row.unique()) == 4 for row in ids)


def test_hot_routing_has_an_expert_that_every_token_picks():
    assert draw("hot", 40, 16, 4, rng()).flatten().bincount().max() == 40


def test_zipf_routing_is_skewed():
    top = {name: draw(name, 1000, 64, 4, rng()).flatten().bincount().max() for name in ("uniform", "zipf")}
    assert top["zipf"] > 5 * top["uniform"]


@pytest.mark.parametrize("routing", ["zipf", "hot"])
def test_flat_twin_touches_the_same_experts_equally(routing):
    skewed = Workload(25, routing)
    (_, ids), (_, flat) = skewed.draw(MODELS["qwen3-30b-a3b"], 3), skewed.flat.draw(MODELS["qwen3-30b-a3b"], 3)
    assert torch.equal(ids.unique(), flat.unique())
    counts = flat.flatten().bincount()
    assert counts.max() - counts[counts > 0].min() <= 1


def test_routing_is_new_in_each_call_and_the_same_in_each_process():
    workload = Workload(8, "uniform")
    assert torch.equal(workload.draw(TINY, 1)[1], workload.draw(TINY, 1)[1])
    assert not torch.equal(workload.draw(TINY, 1)[1], workload.draw(TINY, 2)[1])
    assert torch.equal(workload.hidden(TINY), workload.hidden(TINY))


def test_roofline():
    compute = Roofline(operations=2e9, nbytes=1e6, peak=1e12, bandwidth=1e9)
    assert (compute.seconds, compute.limit) == (2e-3, "compute")
    assert compute.share(4e-3) == 0.5
    memory = Roofline(operations=2e9, nbytes=1e8, peak=1e12, bandwidth=1e10)
    assert (memory.seconds, memory.limit) == (1e-2, "memory")


def test_layers_in_rotation():
    assert layers_in_rotation(600 << 20, 32 << 20) == 2
    assert layers_in_rotation(100 << 20, 32 << 20) == 3  # 256 MiB
    assert layers_in_rotation(600 << 20, 1 << 30) == 6  # three times a large L3
    assert layers_in_rotation(1, 0) == 64


def test_arrange_by_memory():
    entries = [Entry(side, dtype) for dtype in ("int8", "bf16") for side in peers.SIDES[:2]]
    wanted, sizes = {"int8": 2, "bf16": 2}, {"int8": 10, "bf16": 20}
    (group,), left_out = arrange(entries, wanted, sizes, 140)  # 2 * 2 * 10 + 2 * 2 * 20, and 20 while it builds
    assert (group.entries, group.most, left_out) == (tuple(entries), 2, [])
    groups, left_out = arrange(entries, wanted, sizes, 100)
    assert [(g.entries, g.most) for g in groups] == [(tuple(entries[:2]), 2), (tuple(entries[2:]), 2)]
    groups, left_out = arrange(entries, wanted, sizes, 70)
    assert [g.most for g in groups] == [2, 1]
    groups, left_out = arrange(entries, wanted, sizes, 40)
    assert [len(g.entries) for g in groups] == [2, 1]
    assert left_out == [entries[3]]
    groups, _ = arrange(entries, wanted, sizes, 140, process_bytes=1)
    assert len(groups) == 2


def test_rounds_take_turns_and_a_side_that_fails_leaves():
    order = []

    def call(turn: str, i: int) -> float | None:
        order.append((i, turn))
        return None if (turn, i) == ("b", 2) else 0.5

    times = rounds(["a", "b", "c"], call, budget=0, fewest=3)
    assert {turn: len(t) for turn, t in times.items()} == {"a": 3, "c": 3}
    assert [turn for i, turn in order if i == 1] == ["b", "c", "a"]


def test_spread():
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.median, spread.q1, spread.q3, spread.least, spread.most, spread.count) == (3, 2, 4, 1, 5, 5)
    assert Spread.of([1.0]).median == 1


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_source_makes_each_expert_alone(dtype):
    source = Source(BIASED, dtype)
    stacked, alternating = source.stacked(), source.stacked(interleaved=True)
    for e, expert in enumerate(source.experts()):
        for name, value in stacked.items():
            assert torch.equal(value[e], getattr(source.expert(e), name))
        assert torch.equal(alternating["w13"][e][:4:2], expert.w13[:2])
        assert torch.equal(alternating["w2"][e], expert.w2)
    assert stacked["w13"].dtype == {"int8": torch.int8, "bf16": torch.bfloat16}[dtype]
    assert stacked["w13"].nbytes + stacked["w2"].nbytes == source.nbytes
    assert ("w13_scale" in stacked) == (dtype == "int8")
    assert stacked["w13_bias"].shape == (4, 64)


def test_alternate():
    assert alternate(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("layer", [TINY, BIASED], ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_checks_accept_the_layer_and_nothing_else(dtype, layer):
    source, workload = Source(layer, dtype), Workload(9, "uniform")
    weights, ids = workload.draw(layer, 1)
    tokens = checks.sampled_tokens(9)
    right = reference.fused_moe(
        workload.hidden(layer).float(), **source.stacked(), topk_weights=weights, topk_ids=ids, **source.options
    )[tokens]
    expected = checks.expected(source, workload, 1)
    assert expected.check(right.bfloat16(), 1, 1).passed
    assert not expected.check(right.roll(1, 0), 2, 6).passed
    assert not expected.check(right * 1.1, 2, 6).passed
    assert not expected.check(right.index_fill(0, torch.tensor(2), torch.nan), 2, 6).passed


def test_sampled_tokens():
    assert checks.sampled_tokens(1) == [0]
    assert checks.sampled_tokens(3) == [0, 1, 2]
    assert checks.sampled_tokens(1024) == [0, 341, 682, 1023]


def test_touched_experts():
    assert checks.touched_experts(Source(TINY, "int8"), Workload(1, "uniform"), 3) == 2


def test_l3_of_all_caches(tmp_path):
    for cpu, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        for index, (level, size) in enumerate((("1", "32K"), ("3", "16384K"))):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(text + "\n")
    assert machine.l3_bytes(tmp_path) == 32 << 20


def test_probes(kernel):
    probe = probes.Probe(kernel)
    assert probe.parallel, "a probe that runs serially measures one thread, whatever the number asked for"
    assert probe.peak(2, repetitions=1) > 0
    data = probes.aligned(1 << 16)
    data.view(np.int32)[:] = np.arange(1 << 14)
    assert probe.bandwidth(data, 2, repetitions=1) > 0
    sums = np.zeros((2, 16), np.int32)
    probe.functions["stream"](probes.pointer(data), probes.pointer(sums), data.nbytes // probes.STEP // 2, 2)
    assert sums.sum() == np.arange(1 << 14).sum()


CELL = {
    "model", "H", "I", "E", "k", "activation", "bias", "tokens", "routing", "dtype", "touched_experts", "operations",
    "bytes", "peak_gops", "bandwidth_gbs", "roofline_ms", "roofline_q1_ms", "roofline_q3_ms",
    "roofline_limit", "sides", "ratio", "best_peer", "ratio_to_best_peer",
    "int8_over_bf16", "skew_cost", "layers", "load",
}  # fmt: skip
SIDE = {"side", "ms", "q1_ms", "q3_ms", "least_ms", "most_ms", "count", "gops", "gbs", "roofline", "check"}


def rendered(made: dict) -> str:
    console = Console(file=io.StringIO())
    report.show(made, console)
    return console.file.getvalue()


def test_a_whole_run(tmp_path, monkeypatch):
    """Ours and torch in both dtypes, uniform and hot; zentorch and vLLM are asked for and not there."""
    monkeypatch.setattr(packages, "folder", lambda: tmp_path)
    options = Options(**vars(QUICK) | {"routings": ("uniform", "hot"), "peers": ("zentorch", "vllm", "torch")})
    made = run.run(options)
    assert run.passed(made)
    assert json.loads(json.dumps(made, allow_nan=False)) is not None
    found = {(c["routing"], c["dtype"]): c for c in made["cells"]}
    assert set(found) == {(r, d) for r in ("uniform", "hot") for d in ("int8", "bf16")}
    for cell in found.values():
        assert set(cell) == CELL
        assert all(set(side) == SIDE and side["check"]["passed"] and side["count"] == 2 for side in cell["sides"])
        assert cell["operations"] == 2 * 5 * 2 * 3 * 64 * 32
        assert cell["bytes"] == cell["touched_experts"] * 3 * 64 * 32 * {"int8": 1, "bf16": 2}[cell["dtype"]]
        assert (cell["skew_cost"] is None) == (cell["routing"] == "uniform")
        assert (cell["int8_over_bf16"] is None) == (cell["dtype"] == "bf16")
    assert [s["side"] for s in found["uniform", "bf16"]["sides"]] == ["tvm_moe", "torch"]
    assert found["uniform", "bf16"]["best_peer"] == "torch"
    assert found["uniform", "int8"]["ratio"] == {}
    reasons = {row["side"]: row["reason"] for row in made["absent"] if row["dtype"] == "bf16"}
    assert set(reasons) == {"zentorch", "zentorch-nr64", "vllm"}
    text = rendered(made)
    assert "peers not asked for: hf" in text
    assert all(name in text for name in ("limit", "torch", "INT8 over BF16", "skew costs", "vllm"))


def test_sides_are_compared_within_a_round():
    """The machine gave half in the second round: neither our share of the limit nor the ratio may notice."""
    right = checks.Check(error=0, bound=1)
    results = [cells.Result("tvm_moe", [1.0, 2.0, 1.0], right), cells.Result("torch", [3.0, 6.0, 3.0], right)]
    limits = [Limits({"bf16": 1e30}, bandwidth) for bandwidth in (2.0, 1.0, 2.0)]
    made = cells.cell(TINY, Workload(1, "uniform"), "bf16", 1, results, limits)
    nbytes = Source(TINY, "bf16").expert_bytes
    assert made["ratio"] == {"torch": 3}
    assert (made["best_peer"], made["ratio_to_best_peer"]) == ("torch", 3)
    assert [side["roofline"] for side in made["sides"]] == [nbytes / 2, nbytes / 6]
    assert (made["roofline_ms"], made["roofline_limit"]) == (nbytes / 2 * 1e3, "memory")


def test_without_a_compiler_there_is_no_roofline(monkeypatch):
    def missing(*_: object) -> None:
        raise ModuleError("no prebuilt module: pip install 'tvm_moe[build]'")

    monkeypatch.setattr(run, "Probes", missing)
    made = run.run(Options(**vars(QUICK) | {"dtypes": ("bf16",)}))
    assert run.passed(made)
    assert made["cells"][0]["roofline_ms"] is None
    assert "tvm_moe[build]" in rendered(made)


def test_a_side_that_cannot_start_says_why():
    with pytest.raises(SideFailedError, match="UnsupportedISAError: isa='none'"):
        Remote(Job("tvm_moe", TINY, "bf16", 1, 1, isa="none"))


def test_a_side_that_dies_is_not_waited_for():
    remote = Remote(Job("torch", TINY, "bf16", 1, 1))
    remote.process.kill()
    with pytest.raises(SideFailedError, match="exit code -9"):
        remote.ask("version")
    remote.close()


def test_a_wrong_output_is_not_a_pass():
    ours = {"side": "tvm_moe", "check": {"passed": False}}
    assert not run.passed({"absent": [], "cells": [{"sides": [ours]}]})
    assert not run.passed({"absent": [{"side": "tvm_moe"}], "cells": []})


def test_packages_of_the_peers_asked_for():
    assert set(packages.wanted(["--peers", "zentorch,vllm", "--quick", "--peers=hf"])) == {"zentorch", "vllm", "hf"}
    assert packages.version("no-such-distribution") is None


def test_overheads():
    """A process of its own calls in every way; the table has a column for each figure."""
    found = overheads.process("int8", 1, None)
    assert all(value > 0 for value in found.values())
    table = tables.overheads_table({"int8": found})
    assert len(table.columns) == 1 + len(found)


def test_shape():
    assert shape("2048,768,128,8") == LayerShape("2048,768,128,8", 2048, 768, 128, 8)
    for text in ("1,2,3", "a,b,c,d", "8,8,2,3", "0,8,2,1"):
        with pytest.raises(MoEError, match="expected"):
            shape(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing"], "unknown model 'nothing'"),
        (["--shape", "1,2"], "expected four numbers"),
        (["--tokens", "1,x"], "--tokens has 'x'"),
        (["--tokens", "0"], "at least 1"),
        (["--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--routing", "none"], "unknown routing 'none'"),
        (["--peers", "none"], "unknown peer 'none'"),
    ],
)
def test_wrong_options_are_one_line(arguments, message):
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1
