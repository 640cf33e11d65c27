"""Counting what AArch64 code executes: the plugin, the classes, the benchmark's table and the tuner that goes by it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests import aarch64
from tests.test_codegen import assembly
from tvm_moe import kernels, tuning
from tvm_moe.bench import arm
from tvm_moe.cli import app
from tvm_moe.compiler import build, stage, trial, tune
from tvm_moe.emulation.classes import CLASSES, classify, count
from tvm_moe.emulation.counting import Guest
from tvm_moe.errors import EmulationError, MoEError

WORDS = {
    0x4E82A420: "smmla",  # smmla v0.4s, v1.16b, v2.16b
    0x6E42EC20: "bfmmla",  # bfmmla v0.4s, v1.8h, v2.8h
    0x4E829420: "dot",  # sdot v0.4s, v1.16b, v2.16b
    0x4E22CC20: "fmla",  # fmla v0.4s, v1.4s, v2.4s
    0x3DC00020: "vector load/store",  # ldr q0, [x1]
    0x4CDF2020: "vector load/store",  # ld1 {v0.16b-v3.16b}, [x1], #64
    0xAD400440: "vector load/store",  # ldp q0, q1, [x2]
    0xF9400020: "scalar load/store",  # ldr x0, [x1]
    0x54000041: "branch",  # b.ne
    0xD65F03C0: "branch",  # ret
    0x8B020020: "other",  # add x0, x1, x2
    0x4E22D420: "other",  # fadd v0.4s, v1.4s, v2.4s
}


def test_classes():
    names = [*CLASSES, "other"]
    got = [names[i] for i in classify(np.array(list(WORDS), np.uint32))]
    assert got == list(WORDS.values())
    words = np.array([0x4E82A420, 0x8B020020], np.uint32)
    counted = count([(3, words), (2, words[1:])])
    assert (counted["all"], counted["smmla"], counted["branch"]) == (8, 3, 0)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_products_and_repeats(dtype, aarch64_modules):
    """As many products as the tiles say, and the same counts again, but for a few instructions of the interpreter."""
    aarch64.require(plugins=True)
    kernel = kernels.find("i8mm_bf16", dtype)
    job = {"experts": 3, "hidden": 64, "intermediate": 32, "dtype": dtype, "isa": kernel.isa}
    with Guest(TVM_MOE_MODULES=str(aarch64_modules)) as guest:
        (first,), (again,) = (guest.regions("layer", **job, loads={5: [1, 4, 5]}) for _ in range(2))
    tokens, executed = first
    assert tokens == 5
    assert again[1]["all"] == pytest.approx(executed["all"], abs=200)
    assert again[1]["vector load/store"] == executed["vector load/store"]
    pairs = 1 + 2 + 3  # of rows; a row alone fills one
    columns = 2 * 32 * 64 + 64 * 32  # of all K, gate/up and down
    assert executed["smmla" if dtype == "int8" else "bfmmla"] == pairs * columns // 2 // kernel.group
    assert sum(n for name, n in executed.items() if name != "all") < executed["all"]


def test_a_guest_that_fails_says_why(aarch64_modules):
    aarch64.require(plugins=True)
    with (
        Guest(TVM_MOE_MODULES=str(aarch64_modules)) as guest,
        pytest.raises(EmulationError, match=r"failed: .*nothing"),
    ):
        guest.regions("nothing")


def test_the_table_of_the_benchmark(tmp_path):
    """Regression bounds: what is executed is exact. vLLM's layer is the measure, see bench/arm."""
    aarch64.require(plugins=True)
    build.linker("aarch64")
    out = tmp_path / "arm.json"
    done = CliRunner().invoke(app, ["bench", "--arm-instructions", "--json", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = {(row["dtype"], row["tokens"]): row for row in json.loads(out.read_text())["arm_instructions"]}
    assert rows.keys() == {(dtype, tokens) for dtype in kernels.DTYPES for tokens in arm.LOADS}
    bounds = {"int8": {1: 0.48, 4: 0.54, 16: 0.65, 64: 0.77}, "bf16": {1: 0.46, 4: 0.52, 16: 0.64, 64: 0.78}}
    for (dtype, tokens), row in rows.items():
        assert row["ratio"] <= bounds[dtype][tokens]
    for dtype, name in (("int8", "smmla"), ("bf16", "bfmmla")):
        assert rows[dtype, 64]["executed"][name] <= 1.04 * rows[dtype, 64]["needed_products"]


def test_levels_of_other_architectures_are_refused(tmp_path):
    for command in (
        ["bench", "--arm-instructions"],
        ["tune", "--count-instructions", "neoverse-v2", "--out", str(tmp_path)],
    ):
        done = CliRunner().invoke(app, [*command, "--isa", "avx512_vnni"])
        assert done.exit_code == 2
        assert "'avx512_vnni' is no level of aarch64; expected one of generic" in " ".join(done.output.split())


@pytest.mark.parametrize("extra", [["--tokens", "4"], ["--peers", "vllm"], ["--beside-torch"], ["--quick"]])
def test_nothing_goes_with_it(extra):
    done = CliRunner().invoke(app, ["bench", "--arm-instructions", *extra])
    assert done.exit_code == 2
    assert f"--arm-instructions takes the place of the measurement that {extra[0]}" in " ".join(done.output.split())


def test_tuning_by_count(tmp_path, monkeypatch):
    """A log for a CPU that is not here says how it was made; of decisions that execute less, the least wins."""
    aarch64.require(plugins=True)
    monkeypatch.setattr(stage, "buckets", lambda kernel: (8,))
    out = tmp_path / "log"
    command = [
        "tune",
        "--count-instructions",
        "neoverse-v2",
        "--shape",
        "128,64,4,2",
        "--dtype",
        "int8",
        "--trials",
        "3",
    ]
    done = CliRunner().invoke(app, [*command, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    manifest = json.loads((out / tuning.MANIFEST).read_text())
    assert manifest["cpu_key"] == ["0x41", 0xD4F, 0]
    assert manifest["unit"] == "instructions"
    assert "not on hardware" in manifest["measured"]
    assert [r.rows for r in tuning.read(out).records] == [8, 8]
    task = stage.Task("i8mm_bf16", "int8", "down", 128, 8)
    gauge = trial.Counter()
    try:
        meter = trial.Meter(task, "aarch64", 1, tmp_path, gauge)
        paths = [meter.build(d) for d in ((), (("stream", 0), ("unroll", 8)), (("stream", 0), ("unroll", 1)))]
        best, plain, rolled = (costs[0] for costs in meter.costs(paths, 1))
    finally:
        gauge.close()
    assert best < plain < rolled
    assert tune.without_defaults(task, (("stream", 1), ("unroll", 16)), "aarch64") == ()


@pytest.mark.parametrize(
    ("rows", "decisions"),
    [(1, {"prefetch": 2}), (1, {"unroll": 1}), (4, {"stream": 0, "prefetch": 4}), (8, {"prefetch": 4, "unroll": 2})],
)
def test_every_kind_of_decision_builds(rows, decisions):
    """A prefetch among streamed loads is no product; of one step, a row alone fills half a register."""
    task = stage.Task("i8mm_bf16", "bf16", "down", 64, rows)
    chosen = tuple(sorted(decisions.items()))
    compiled = build.compile_kernel(task.kernel, "aarch64", lambda _, arch: stage.build_ir(task, arch, chosen))
    lines = compiled.mod.inspect_source("asm").splitlines()
    assert any("bfmmla" in line for line in lines)
    assert any(re.match(r"\s+prfm\b", line) for line in lines) == bool(decisions.get("prefetch"))


def test_a_guest_that_died_is_replaced(tmp_path):
    aarch64.require(plugins=True)
    task = stage.Task("i8mm_bf16", "int8", "down", 64, 2)
    gauge = trial.Counter()
    try:
        meter = trial.Meter(task, "aarch64", 1, tmp_path, gauge)
        path = meter.build(())
        before = meter.costs([path], 1)
        gauge.guest.process.kill()
        with pytest.raises(EmulationError, match="failed"):
            meter.costs([path], 1)
        assert meter.costs([path], 1)[0][0] == pytest.approx(before[0][0], rel=0.05)
    finally:
        gauge.close()


def test_unknown_cpus_are_named():
    done = CliRunner().invoke(app, ["tune", "--count-instructions", "pentium"])
    assert done.exit_code == 2
    assert "unknown CPU 'pentium'; expected one of neoverse-v1" in " ".join(done.output.split())
    with pytest.raises(MoEError, match="neoverse-v2"):
        tuning.named_arm_key("")


def test_arm_cpus_are_known_by_their_part(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\nCPU revision\t: 1\n\nprocessor\t: 1\n")
    assert tuning.arm_key(file) == tuning.named_arm_key("neoverse-v2")
    file.write_text("vendor_id : GenuineIntel\n")
    assert tuning.arm_key(file) == []
    assert tuning.arm_key(tmp_path / "missing") == []


def test_streamed_loads():
    """One load of several registers brings what a K step needs, and moves its own address on."""
    text = "\n".join(assembly(kernels.find("i8mm_bf16", "int8"), "aarch64"))
    assert len(re.findall(r"ld1\s+\{ v\d+\.16b, v\d+\.16b, v\d+\.16b, v\d+\.16b \}, \[x\d+\],", text)) > 100
