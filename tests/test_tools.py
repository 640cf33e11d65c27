"""What a user asks the package about itself: `explain`, ``show-config``, ``verify`` and ``build``."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

import tvm_moe
from tests.helpers import make_case
from tvm_moe import ModuleError, cli, isa, kernels, manifest, modules
from tvm_moe import verify as verification
from tvm_moe.activations import ACTIVATIONS
from tvm_moe.compiler import build, mathfn

ARCH = isa.machine()
GENERIC = kernels.find("generic", "bf16")


def invoke(*args):
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def verify(*files, code):
    outcome = invoke("verify", *files, "--json", "-")
    assert outcome.exit_code == code, outcome.output
    return json.loads(outcome.stdout)


def test_verify_passes_every_module_that_serves(kernel):
    checks = verify(modules.find(kernel), code=0)
    layers = {f"layer, {name}" for name in ACTIVATIONS}
    assert {c["what"] for c in checks} >= layers | {f"accumulators, {n} rows" for n in kernel.rows}
    assert all(c["passed"] and c["error"] <= c["bound"] for c in checks)
    if kernel.dtype == "int8":
        assert {c["error"] for c in checks if c["what"].startswith("accumulators")} == {0.0}


def test_verify_finds_a_module_that_is_a_little_wrong(tmp_path, monkeypatch):
    """Built from other math, whole and rightly stamped."""
    monkeypatch.setattr(mathfn, "relu2", lambda g: g * g * mathfn.f32(1.02))
    path = tmp_path / modules.filename(GENERIC, ARCH)
    build.export(GENERIC, ARCH, path)
    checks = verify(path, code=1)
    assert [c["what"] for c in checks if not c["passed"]] == ["layer, relu2"]


def test_verify_refuses_what_it_cannot_run(tmp_path, monkeypatch):
    path = shutil.copy(modules.find(GENERIC), tmp_path)
    assert_refused("no readable manifest", path)
    shutil.copy(modules.find(GENERIC).with_suffix(".json"), tmp_path)
    assert_refused("no module file", tmp_path / "absent.so")
    assert_refused("holds kernel 'cpu'; expected one of", modules.find_cpu())
    monkeypatch.setattr(isa, "features", frozenset)
    for kernel in kernels.rows_for(ARCH, "int8")[1:]:
        name = tmp_path / modules.filename(kernel, ARCH)
        name.write_bytes(b"anything")
        manifest.write_manifest(name, kernel, ARCH)
        assert_refused("cannot be verified here: this CPU lacks", name)


def assert_refused(message, path):
    outcome = invoke("verify", path)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_build_names_what_it_does_not_know(tmp_path):
    outcome = invoke("build", "--isa", "pentium", "--out", tmp_path)
    assert outcome.exit_code == 2
    assert "no kernels for level pentium" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_show_config_is_what_serves(monkeypatch):
    monkeypatch.delenv(isa.ENVIRONMENT, raising=False)
    config = json.loads(invoke("show-config", "--json", "-").stdout)
    assert config["architecture"] == ARCH
    assert config["features"] == sorted(isa.features())
    assert config["threads"]["next_call"] == tvm_moe.get_num_threads()
    for dtype in kernels.DTYPES:
        choice = isa.choose(dtype)
        assert config["kernels"][dtype]["kernel"] == choice.kernel.name
        assert config["kernels"][dtype]["module"] == str(modules.find(choice.kernel))
        assert config["kernels"][dtype]["rejected"] == {k.isa: why for k, why in choice.rejected}


def test_explain_tells_levels_reasons_and_paths(monkeypatch):
    monkeypatch.setenv(isa.ENVIRONMENT, "generic")
    text = tvm_moe.explain()
    assert isa.brand() in text
    assert "TVM_MOE_ISA=generic" in text
    assert str(modules.find(GENERIC)) in text
    for kernel in kernels.rows_for(ARCH, "bf16")[1:]:
        assert f"rejected {kernel.isa}: above the cap TVM_MOE_ISA=generic" in text
    assert invoke("show-config").stdout.splitlines()[0] == text.splitlines()[0]


def test_explain_about_experts(kernel, monkeypatch):
    monkeypatch.delenv(isa.ENVIRONMENT, raising=False)
    packed = make_case(dtype=kernel.dtype).pack(kernel)
    text = tvm_moe.explain(packed)
    assert repr(packed) in text
    assert f"packed for and served by {kernel.isa}, kernel {kernel.name}" in text
    assert str(modules.find(kernel)) in text
    assert ("isa=None would take" in text) == (isa.choose(kernel.dtype).kernel is not kernel)


def test_explain_where_modules_cannot_be_found(monkeypatch, tmp_path):
    monkeypatch.setenv(modules.ENVIRONMENT, str(tmp_path / "absent"))
    assert "absent is no folder" in tvm_moe.explain()


def test_verify_skips_levels_of_a_folder_that_this_cpu_lacks(built, tmp_path, monkeypatch):
    """But a file that is named is to be verified, or an error; so is a folder with nothing for this CPU."""
    foreign = kernels.find("amx", "int8")
    monkeypatch.setattr(isa, "features", lambda: frozenset())
    for path in built.glob("*"):
        shutil.copy(path, tmp_path)
    stranger = tmp_path / modules.filename(foreign, "x86_64")
    stranger.write_bytes(b"")
    stranger.with_suffix(".json").write_text(json.dumps({"kernel": foreign.name}))
    said = []
    found = verification.module_files([tmp_path], said.append)
    assert stranger not in found
    assert len(found) == 2
    assert len(said) == 1
    assert said[0].startswith(f"{stranger.name}: ")
    assert verification.module_files([stranger], said.append) == [stranger]
    for path in found:
        path.unlink()
    with pytest.raises(ModuleError, match="no kernel modules for this CPU in"):
        verification.module_files([tmp_path], said.append)
