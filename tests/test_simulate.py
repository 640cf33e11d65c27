"""The simulated schedule: exact where it can be counted by hand, the driver's own items, and laws that hold for any work."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import tvm_moe
from tests.helpers import make_case
from tvm_moe import kernels, plan, runtime
from tvm_moe.bench import report, simulate, work
from tvm_moe.bench.costs import Costs
from tvm_moe.bench.options import Options
from tvm_moe.bench.routing import ROUTINGS, Workload
from tvm_moe.bench.simulate import Simulation
from tvm_moe.bench.work import Item, Work
from tvm_moe.cli import app
from tvm_moe.errors import MoEError
from tvm_moe.kernels import MicroKernel
from tvm_moe.models import MODELS, LayerShape
from tvm_moe.plan import Field, LayerSizes

SHAPE = LayerShape("some", 200, 300, 16, 3)
VNNI = [kernels.find("avx512_vnni", dtype) for dtype in kernels.DTYPES]


def prepares(*seconds: float) -> list[Item]:
    return [Item("prepare", s, (), ("prepared", 0)) for s in seconds]


def real(kernel: MicroKernel, shape: LayerShape, tokens: int, routing: str, threads: int) -> Work:
    p = plan.make(kernel, simulate.sizes_of(shape), tokens, shape.k, threads, shape.H, shape.H)
    ids = Workload(tokens, routing).draw(shape, 1)[1]
    return work.of(kernel, p, work.blocks(ids, shape.E, p[Field.ROW_BLOCK]), Costs())


@pytest.mark.parametrize(
    ("seconds", "threads", "makespan"),
    [
        ([3.0], 4, 3),
        ([1.0, 1.0, 1.0, 1.0], 2, 2),
        ([1.0, 2.0, 4.0], 1, 7),
        ([4.0, 1.0, 1.0, 1.0], 2, 5),  # the second item is held by the thread that has the first
        ([4.0, 1.0, 5.0, 1.0, 1.0], 2, 6),  # so are 0 1, then 2 3; the thread free at 4 takes 4 while it does 1
    ],
)
def test_independent_items(seconds, threads, makespan):
    done = Simulation(Work(prepares(*seconds), {}), threads)
    assert done.makespan == makespan
    assert done.ratio == makespan / (sum(seconds) / threads)
    assert done.lost == {"end": pytest.approx(threads * makespan - sum(seconds))}


def test_waiting_by_hand():
    """Thread 0 holds both prepare items, so thread 1 waits 2 s; then 3 s and 1 s of last steps a block, and down items."""
    gate_up = [Item("gate/up", 3.0, (("prepared", 0),), ("ready", b)) for b in (0, 1)]
    down = [Item("down", 1.0, (("ready", b),), ("combined", 0)) for b in (0, 1)]
    done = Simulation(Work([*prepares(1, 1), *gate_up, *down], {("ready", 0): 1.0, ("combined", 0): 2.0}), 2)
    # Thread 1: block 0 from 2 to 5 and 1 s more, then block 1 from 6 to 9. Thread 0: both down items, at 6 and at 9.
    assert done.begun == {0: 0, 1: 1, 2: 2, 3: 6, 4: 6, 5: 9}
    assert done.ended == {0: 1, 1: 2, 2: 5, 3: 9, 4: 7, 5: 10}
    assert done.makespan == 12
    assert done.lost == {"prepare": 2, "intermediate": (6 - 2) + (9 - 7), "end": 3}


def test_rings_make_items_wait():
    """Block 1 may only begin when the intermediate of block 0 is complete, group 1 when group 0 is combined."""
    items = [
        Item("gate/up", 1.0, (), ("ready", 0)), Item("gate/up", 1.0, (), ("ready", 0)),
        Item("gate/up", 1.0, (("ready", 0),), ("ready", 1)),
        Item("down", 1.0, (("ready", 0),), ("combined", 0)),
        Item("down", 1.0, (("ready", 1), ("combined", 0)), ("combined", 1)),
    ]  # fmt: skip
    done = Simulation(Work(items, {("combined", 0): 5.0}), 3)
    assert done.begun == {0: 0, 1: 1, 2: 2, 3: 3, 4: 9}
    assert {name: round(seconds) for name, seconds in done.lost.items()} == {"ring_h": 2, "intermediate": 3, "ring_y": 6,
        "end": 30 - 10 - 11}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("threads", [8, 96, 192])
def test_work_is_balanced(name, routing, threads):
    """At 1024 tokens no thread count wastes more than 5 %: hot experts are many items, and threads share a combine."""
    made = simulate.row(VNNI[0], MODELS[name], Workload(1024, routing), threads, Costs())
    assert made["ratio"] <= simulate.GOAL


@pytest.mark.parametrize("kernel", VNNI, ids=lambda k: k.dtype)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_one_thread_never_waits(kernel, routing):
    todo = real(kernel, SHAPE, 70, routing, threads=1)
    done = Simulation(todo, 1)
    assert done.ratio == pytest.approx(1)
    assert list(done.begun) == list(range(len(todo.items)))
    assert set(done.lost) <= {*simulate.LOSSES.values(), "end"}
    assert sum(map(abs, done.lost.values())) < 1e-9


@given(
    data=st.data(), dtype=st.sampled_from(kernels.DTYPES), routing=st.sampled_from(ROUTINGS),
    tokens=st.integers(1, 200), threads=st.integers(1, 40), hidden=st.integers(1, 500), intermediate=st.integers(1, 500),
    experts=st.integers(1, 20),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_laws(data, dtype, routing, tokens, threads, hidden, intermediate, experts):
    shape = LayerShape("any", hidden, intermediate, experts, data.draw(st.integers(1, experts)))
    todo = real(kernels.find("avx512_vnni", dtype), shape, tokens, routing, threads)
    done = Simulation(todo, threads)
    assert set(done.begun) == set(done.ended) == set(range(len(todo.items)))  # all work is done once
    longest = max(item.seconds for item in todo.items)
    assert max(longest, todo.seconds / threads) <= done.makespan * (1 + 1e-9)
    assert done.makespan <= todo.seconds * (1 + 1e-9)
    assert all(seconds >= -1e-9 * done.makespan * threads for seconds in done.lost.values())
    flags: dict[work.Flag, float] = {}
    for ticket, item in enumerate(todo.items):
        assert done.ended[ticket] == pytest.approx(done.begun[ticket] + item.seconds)
        flags[item.joins] = max(flags.get(item.joins, 0), done.ended[ticket])
    for ticket, item in enumerate(todo.items):
        for flag in item.waits:
            assert done.begun[ticket] >= (flags[flag] + todo.last.get(flag, 0)) * (1 - 1e-9)
    assert done.makespan == pytest.approx(max(flags[flag] + todo.last.get(flag, 0) for flag in flags))


@pytest.mark.parametrize(("T", "E", "k"), [(1, 4, 2), (9, 5, 2), (421, 7, 2), (64, 3, 3)])
def test_the_items_are_those_of_the_driver(kernel, set_num_threads, T, E, k):
    """A real call leaves its blocks and its counters in the scratch buffer."""
    set_num_threads(3)
    case = make_case(T=T, E=E, k=k, H=200, I=300, dtype=kernel.dtype)
    packed = case.pack(kernel)
    case.run(packed)
    p = packed.layer.plan(T, k, tvm_moe.get_num_threads(), 200, 200)
    array, start, _ = runtime._scratch.held
    scratch = array[start - array.ctypes.data :]
    rows = work.blocks(case.ids, E, p[Field.ROW_BLOCK])
    most, at = p[Field.BLOCKS_MAX], p[Field.AT_BLOCKS]
    assert scratch[at : at + 12 * most].view(np.int32)[2 * most :][: len(rows)].tolist() == rows
    sync = scratch[p[Field.AT_SYNC] :].view(np.int64)
    todo = work.of(kernel, p, rows, Costs())
    assert sync[plan.SYNC_BLOCK_COUNT] == len(rows)
    assert sync[plan.SYNC_TICKET] == len(todo.items) + 3  # each thread takes one too many
    joined = {
        name: [i.joins[1] for i in todo.items if i.joins[0] == name]
        for name in ("prepared", "ready", "down", "combined")
    }
    assert sync[plan.SYNC_PREPARED] == len(joined["prepared"])
    counts = sync[plan.SYNC_BLOCKS :]
    assert counts[: len(rows)].tolist() == np.bincount(joined["ready"]).tolist()
    items2 = p[Field.ITEMS2]
    assert counts[2 * most :][:items2].tolist() == np.bincount(joined["down"]).tolist()
    assert counts[2 * most + items2 :][:items2].tolist() == np.bincount(joined["combined"]).tolist()


def test_costs_by_hand():
    int8, bf16 = VNNI
    costs = Costs(peak=100, memory=1, cache=10, item=2)
    # 6 rows through 2 panels of 64 columns, K = 128: 196608 operations, 16384 weights, 768 accumulators.
    assert costs.gemm(bf16, 6, 2, 64) == pytest.approx(2e-6 + 196608 / 100e9 + 32768 / 1e9 + 3072 / 10e9)
    assert costs.gemm(int8, 6, 2, 32) == pytest.approx(2e-6 + 196608 / 200e9 + 16384 / 1e9 + 3072 / 10e9)
    assert Costs.parse("peak=100,item=2,memory=1,cache=10") == costs
    assert Costs.parse(str(costs)) == costs
    assert Costs.parse("") == Costs()


def test_all_operations_and_weights_are_there():
    """With a peak only, a call costs its operations; the sizes are multiples of all panels."""
    shape, infinite = LayerShape("even", 256, 128, 8, 2), 1e30
    for kernel in VNNI:
        p = plan.make(kernel, simulate.sizes_of(shape), 50, 2, 4, 256, 256)
        rows = work.blocks(Workload(50, "zipf").draw(shape, 1)[1], 8, p[Field.ROW_BLOCK])
        todo = work.of(kernel, p, rows, Costs(1, infinite, infinite, 1 / infinite))
        assert todo.seconds == pytest.approx(shape.operations(50) / (2e9 / kernel.weight_size))
        todo = work.of(kernel, p, rows, Costs(infinite, 1, infinite, 1 / infinite))
        assert todo.seconds == pytest.approx(len(rows) * shape.expert_weights() * kernel.weight_size / 1e9)


def test_ungated_layers_have_no_gate():
    assert simulate.sizes_of(LayerShape("r", 64, 32, 4, 2, "relu2", bias=True)) == LayerSizes(
        4, 64, 32, False, True, True
    )


def test_the_result_and_its_table():
    options = Options((SHAPE,), tokens=(9,), routings=("uniform", "hot"), simulate_threads=(1, 50), isa="generic")
    made = simulate.run(options)
    assert json.loads(json.dumps(made, allow_nan=False))["costs"] == vars(Costs())
    keys = [(r["threads"], r["routing"], r["dtype"]) for r in made["simulation"]]
    assert keys == [(n, r, d) for n in (1, 50) for r in ("uniform", "hot") for d in ("int8", "bf16")]
    for row in made["simulation"]:
        assert row["ratio"] == pytest.approx(row["makespan_ms"] / row["ideal_ms"])
        assert 1 / row["ratio"] + sum(row["lost"].values()) == pytest.approx(1)
    console = Console(file=io.StringIO(), width=150)
    report.show(made, console)
    assert all(text in console.file.getvalue() for text in ("some: simulated", "uniform int8", "hot bf16", "1.000"))


def test_the_command_times_nothing(monkeypatch, tmp_path):
    def never(*_: object) -> None:
        raise AssertionError("a kernel module is looked for")

    monkeypatch.setattr("tvm_moe.modules.find", never)
    target = tmp_path / "made.json"
    arguments = ["bench", "--model", "olmoe-1b-7b", "--simulate-threads", "2,3", "--json", str(target)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    made = json.loads(target.read_text())["simulation"]
    assert {(r["tokens"], r["threads"], r["routing"]) for r in made} == {(1024, n, r) for n in (2, 3) for r in ROUTINGS}
    assert {r["model"] for r in made} <= set(MODELS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate-threads", "0"], "from 1 to 4096, got (0,)"),
        (["--simulate-threads", "8,5000"], "from 1 to 4096"),
        (["--simulate-threads", "many"], "--simulate-threads has 'many', expected numbers"),
        (["--simulate-threads", ","], "--simulate-threads has ''"),
        (["--simulate-threads", "8", "--peers", "torch"], "that --peers belongs to"),
        (["--simulate-threads", "8", "--threads", "2"], "that --threads belongs to"),
        (["--simulate-threads", "8", "--pack"], "that --pack belongs to"),
        (["--simulate-costs", "peak=1"], "belongs to --simulate-threads"),
        (["--simulate-threads", "8", "--simulate-costs", "speed=1"], "has 'speed=1', expected numbers above 0 such as"),
        (["--simulate-threads", "8", "--simulate-costs", "peak=0"], "has 'peak=0'"),
        (["--simulate-threads", "8", "--simulate-costs", "peak=nan"], "has 'peak=nan'"),
        (["--simulate-threads", "8", "--simulate-costs", "peak"], "has 'peak'"),
    ],
)
def test_wrong_options_are_one_line(arguments, message):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1


def test_wrong_costs():
    with pytest.raises(MoEError, match="has 'item=inf', expected numbers above 0 such as peak=235,memory=5"):
        Costs.parse("item=inf")
