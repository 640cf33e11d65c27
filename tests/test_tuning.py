"""Tune logs: made by a real search, found by CPU, stage, K and rows, refused when damaged, and bit-equal in INT8."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import tvm_moe
from tests.helpers import make_case
from tvm_moe import MoEError, isa, kernels, modules, runtime, tuning
from tvm_moe.cli import app
from tvm_moe.tuning import Logs, Record

KERNEL = kernels.find("avx512_vnni", "int8")


def made(stage="gate_up", K=64, rows=1, **decisions):
    return Record(KERNEL.name, stage, K, rows, tuple(sorted(decisions.items())), 2.0, 1.0)


@pytest.fixture
def fresh_logs(tmp_path, monkeypatch):
    """Logs are read from tmp_path, and nothing that was found before is remembered."""
    monkeypatch.setenv(tuning.ENVIRONMENT, str(tmp_path))
    tuning.this_cpu.cache_clear()
    runtime.load_tuned.cache_clear()
    yield tmp_path
    tuning.this_cpu.cache_clear()
    runtime.load_tuned.cache_clear()


def write(folder, *records, **about):
    folder.mkdir(exist_ok=True)
    tuning.write(folder, {"cpu": folder.name, "cpu_key": tuning.cpu_key()} | about, records)


def test_the_nearest_record_serves():
    logs = Logs("cpu", (made(K=64, prefetch=2), made(K=1024, prefetch=4), made(K=64, rows=6, prefetch=0)))
    choice = tuning.choose(KERNEL, 700, 32, logs)
    assert choice.decisions["gate_up"] == {
        r: (("prefetch", 4),) if r < 3 else (("prefetch", 0),) for r in KERNEL.rows
    }  # the nearest rows first: 2 of (1, 6) is 1, 3 is 6
    assert choice.decisions["down"] == dict.fromkeys(KERNEL.rows, ())
    assert choice.sources["gate_up"][1] == "nearest record (K 1024, 1 rows): prefetch=4"
    assert choice.sources["down"][1] == "default"
    assert tuning.choose(KERNEL, 64, 32, logs).sources["gate_up"][1] == "tuned: prefetch=2"


def test_equal_decisions_share_a_module():
    logs = Logs("cpu", (made(K=64, prefetch=2), made(K=128, prefetch=2), made(K=256)))
    assert tuning.choose(KERNEL, 64, 1, logs).variant == tuning.choose(KERNEL, 128, 1, logs).variant != ""
    assert tuning.choose(KERNEL, 256, 1, logs).variant == ""  # the defaults won there
    assert set(tuning.variants(KERNEL, logs)) == {tuning.choose(KERNEL, 64, 1, logs).variant}
    assert tuning.variants(kernels.find("generic", "bf16"), logs) == {}


def test_records_survive_a_file(fresh_logs):
    records = made(K=64, prefetch=2), made(stage="down", rows=6)
    write(fresh_logs / "cpu", *records)
    assert tuning.read(fresh_logs / "cpu").records == records
    assert tuning.this_cpu() == Logs("cpu", records, fresh_logs / "cpu")


def test_logs_of_another_cpu_are_not_used(fresh_logs):
    write(fresh_logs / "other", made(), cpu_key=["Nobody", 1, 1])
    assert tuning.this_cpu().cpu != "other"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "cannot be read as a tune log"),
        (lambda text: "[1]", "holds a list, expected an object"),
        (lambda text: text.replace('"format": 2', '"format": 99'), "format 99, expected 2"),
        (lambda text: text.replace('"K": 64', '"K": "x"'), "a record is damaged"),
        (lambda text: text.replace('"K": 64', '"K": -1'), "a record is damaged"),
        (lambda text: text.replace('"K": 64', '"K": Infinity'), "a record is damaged"),
        (lambda text: text.replace('"decisions": {}', '"decisions": []'), "a record is damaged"),
        (lambda text: "[" * 100_000, "cannot be read as a tune log"),
        (lambda text: text.replace('"tuned": 1.0', '"tuned": NaN'), "a record is damaged"),
        (lambda text: text.replace('"stage"', '"stages"'), "a record is damaged"),
        (lambda text: text.replace("gate_up", "sideways"), "of another version"),
        (lambda text: text.replace(KERNEL.name, "int8_of_yesterday"), "of another version"),
    ],
)
def test_damaged_logs_are_refused_by_name(fresh_logs, damage, message):
    write(fresh_logs / "cpu", made())
    manifest = fresh_logs / "cpu" / tuning.MANIFEST
    manifest.write_text(damage(manifest.read_text()))
    with pytest.raises(MoEError, match=message) as error:
        tuning.read(fresh_logs / "cpu")
    assert str(manifest) in str(error.value)


def test_a_folder_that_is_none(monkeypatch, fresh_logs):
    monkeypatch.setenv(tuning.ENVIRONMENT, str(fresh_logs / "missing"))
    with pytest.raises(MoEError, match="is no folder; unset it"):
        tuning.this_cpu()


def test_decisions_of_another_version_are_refused():
    from tvm_moe.compiler import module

    with pytest.raises(MoEError, match=r"decision prefetch=3 of OuterProduct is not one of .*tune again"):
        module.tile_function(KERNEL, "x86_64", 1, (("prefetch", 3),))


def test_cpu_key_names_this_cpu():
    key = tuning.cpu_key()
    assert key == [] or (len(key) == 3 and all(isinstance(part, int) for part in key[1:]) and key[0].isprintable())


def test_every_decision_gives_the_same_sums(int8_kernel, tmp_path):
    """Whatever a log decides, each output is one chain over K: other modules, equal bits."""
    from tvm_moe.compiler import build, module
    from tvm_moe.schedules import style

    case = make_case(T=40, E=3, H=200, I=70, dtype="int8")
    packed = case.pack(int8_kernel)
    want = case.run(packed)
    tile = style(int8_kernel.style)(int8_kernel, "x86_64", 1)
    last = tuple((d.name, d.candidates[-1]) for d in tile.decisions())
    choice = tuning.Choice(
        {"gate_up": dict.fromkeys(int8_kernel.rows, ()), "down": dict.fromkeys(int8_kernel.rows, last)}, {}
    )
    path = build.export(
        int8_kernel, kernels.machine(), tmp_path / "tuned.so", lambda k, arch: module.build_ir(k, arch, choice)
    )
    out = torch.empty_like(want)
    packed.layer.run(case.x, out, case.weights, case.ids, module=runtime.Module(path))
    assert torch.equal(out, want)


@pytest.mark.parametrize("kernel", kernels.TABLE, ids=lambda k: k.key)
def test_a_task_runs_tiles_of_its_rows_only(kernel):
    """The panel loop cuts a block into equal tiles of at most MR rows; others than the task's are not in its module."""
    from tvm_moe.compiler import stage

    for rows in stage.buckets(kernel):
        n = stage.Task(kernel.isa, kernel.dtype, "down", 64, rows).block_rows
        tiles = -(-n // kernel.MR)
        assert {n * (i + 1) // tiles - n * i // tiles for i in range(tiles)} == {rows}


def test_tune_end_to_end(fresh_logs, monkeypatch):
    """A tiny search: its log is found, applied and announced, its result is bit-equal, and a second run goes on."""
    from tvm_moe.compiler import stage, tune

    int8_kernel = isa.choose("int8").kernel
    case = make_case(T=9, E=4, H=128, I=64, dtype="int8")
    want = case.run(case.pack(int8_kernel))
    monkeypatch.setattr(stage, "buckets", lambda kernel: (kernel.MR,))
    monkeypatch.setattr(tune.statistics, "quantiles", lambda *_, **__: (2, 2, 2))  # whatever was found wins the duel
    monkeypatch.setenv(
        "XDG_CACHE_HOME",
        str(
            shutil.copytree(
                modules.cache_folder(), fresh_logs / "c" / "tvm_moe" / modules.cache_folder().name
            ).parent.parent
        ),
    )
    folder = fresh_logs / "here"
    command = [
        "tune",
        "--shape",
        "128,64,4,2",
        "--dtype",
        "int8",
        "--isa",
        int8_kernel.isa,
        "--trials",
        "2",
        "--out",
        str(folder),
    ]
    first = CliRunner().invoke(app, [*command, "--json", str(fresh_logs / "made.json")])
    assert first.exit_code == 0, first.output
    assert "default -> tuned" in first.output
    records = json.loads((fresh_logs / "made.json").read_text())["records"]
    assert [r["stage"] for r in records] == list(tuning.STAGES)
    log = (folder / "work" / "database_tuning_record.json").read_text()
    assert len(log.splitlines()) == 2 * len(records)
    program = (
        "from tvm_moe.compiler import stage; stage.buckets = lambda k: (k.MR,); from tvm_moe.cli import app; app()"
    )
    again = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert (folder / "work" / "database_tuning_record.json").read_text() == log  # two trials were there already
    tuning.this_cpu.cache_clear()
    packed = case.pack(int8_kernel)
    assert torch.equal(case.run(packed), want)
    variant = packed.layer.tuning.variant
    if variant:
        assert packed.layer.module.path.name.endswith(f"-{variant}.so")
        assert f"variant {variant} by the logs of" in tvm_moe.explain(packed)
    else:
        assert "the defaults are best here" in tvm_moe.explain(packed)


def test_tuned_modules_that_nobody_built_are_announced(int8_kernel, fresh_logs):
    write(fresh_logs / "cpu", replace(made(prefetch=2), kernel=int8_kernel.name))
    packed = make_case(dtype="int8").pack(int8_kernel)
    assert "NOT BUILT, the defaults serve: run tvm-moe build --tuned" in tvm_moe.explain(packed)
    assert packed.layer.module is runtime.load(int8_kernel)


def test_the_committed_logs_are_whole():
    for manifest in tuning.LOGS.glob(f"*/{tuning.MANIFEST}"):
        assert tuning.read(manifest.parent).records


def test_the_committed_databases_hold_what_the_manifests_say():
    from tvm_moe.compiler import stage, tune

    for manifest in tuning.LOGS.glob(f"*/{tuning.MANIFEST}"):
        database = tune.open_database(manifest.parent)
        for r in tuning.read(manifest.parent).records:
            row = kernels.by_name(r.kernel)
            task = stage.Task(row.isa, row.dtype, r.stage, r.K, r.rows)
            kept = [
                tune.without_defaults(task, d, row.arches[0]) for d, _ in tune.trials_of(database, tune.workload(task))
            ]
            assert kept == ([r.decisions] if r.decisions else [])


@pytest.mark.parametrize("row", kernels.TABLE, ids=lambda row: row.key)
def test_every_tile_has_a_design_space_whose_records_can_be_read_again(row):
    """The schedule's defaults are in it, and a trace gives the decisions that it was made with."""
    from tvm.s_tir import Schedule

    from tvm_moe.compiler import stage, trial, tune

    arch = row.arches[0]
    for rows in {row.rows[0], row.MR}:
        task = stage.Task(row.isa, row.dtype, "down", 96, rows)
        mod, found = tune.workload(task), []
        for s in tune.spaces(task, arch)(Schedule(mod)):
            again = Schedule(mod)
            s.trace.apply_to_schedule(again, remove_postproc=False)
            found.append(trial.decisions_of(s.mod))
            assert trial.decisions_of(again.mod) == found[-1] != ()
        assert () in [tune.without_defaults(task, decisions, arch) for decisions in found]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp4"], "unknown dtype 'fp4'"),
        (["--model", "gpt-9"], "unknown model 'gpt-9'"),
        (["--shape", "1,2"], "expected four numbers"),
        (["--checkpoint", "nowhere"], "no such checkpoint folder"),
    ],
)
def test_bad_input(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["tune", *arguments, "--out", str(tmp_path / "logs")])
    assert done.exit_code == 2
    assert message in done.output


def test_logs_of_another_cpu_are_not_overwritten(tmp_path):
    write(tmp_path / "theirs", made(), cpu_key=["Nobody", 1, 1])
    done = CliRunner().invoke(app, ["tune", "--out", str(tmp_path / "theirs")])
    assert done.exit_code == 2
    assert "holds the log of another CPU" in done.output
