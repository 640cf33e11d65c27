"""How missing modules are built, what their cache keys cover, and what happens without a compiler."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tvm_moe import ModuleError, SlowPathWarning, cache, cli, isa, kernels, manifest, modules
from tvm_moe.compiler import build

ROOT = Path(__file__).parent.parent
ARCH = isa.machine()
GENERIC = kernels.find("generic", "bf16")
NAME = modules.filename(GENERIC, ARCH)


def test_a_missing_module_is_built_into_the_cache_and_announced(built, places):
    with pytest.warns(SlowPathWarning, match=f"building {NAME} into {places[2]}"):
        path = modules.find(GENERIC)
    assert path == places[2] / NAME
    assert sorted(p.name for p in places[2].iterdir()) == sorted([NAME, NAME.replace(".so", ".json")])
    assert places[2].stat().st_mode & 0o022 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert modules.find(GENERIC) == path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == json.loads(path.with_suffix(".json").read_text())["sha256"]
    assert path.read_bytes() == (built / NAME).read_bytes(), "the same sources, in another process perhaps"


def test_the_build_command_writes_what_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "TABLE", (GENERIC,))
    outcome = CliRunner().invoke(cli.app, ["build", "--isa", "generic", "--out", str(tmp_path / "out"), "--json", "-"])
    assert outcome.exit_code == 0, outcome.output
    made = [tmp_path / "out" / modules.filename(None, ARCH), tmp_path / "out" / NAME]
    assert json.loads(outcome.stdout) == list(map(str, made))
    assert len(list((tmp_path / "out").iterdir())) == 4
    monkeypatch.setenv(modules.ENVIRONMENT, str(tmp_path / "out"))
    assert [modules.find_cpu(), modules.find(GENERIC)] == made


def test_building_takes_from_the_cache_what_is_whole(built, places, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "TABLE", (GENERIC,))
    for path in (places[2] / NAME, places[2] / modules.filename(None, ARCH)):
        for suffix in (".so", ".json"):
            shutil.copy(built / path.with_suffix(suffix).name, path.with_suffix(suffix))
    made = []
    monkeypatch.setattr(build, "export", lambda kernel, arch, path: made.append(path) or path)
    modules.build_all(tmp_path / "out", None, None, lambda path: None)
    assert made == []
    assert (tmp_path / "out" / NAME).read_bytes() == (built / NAME).read_bytes()
    whole = modules._checked

    def unreadable(path, kernel):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(modules, "_checked", unreadable)
    modules.build_all(tmp_path / "out", None, None, lambda path: None)
    assert made.pop() == tmp_path / "out" / NAME
    monkeypatch.setattr(modules, "_checked", whole)
    (places[2] / NAME).write_bytes(b"damaged")
    modules.build_all(tmp_path / "out", None, None, lambda path: None)
    assert made == [tmp_path / "out" / NAME]


def test_a_new_cache_folder_is_ours_alone(places, tmp_path, monkeypatch):
    monkeypatch.setattr(modules, "cache_folder", lambda: tmp_path / "a" / "b")
    monkeypatch.setattr(modules, "_build", lambda kernel, path, arch: None)
    with pytest.raises(ModuleError, match="no module file"):
        modules.find(GENERIC)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


def test_a_cache_folder_that_cannot_be_made(places, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(modules, "cache_folder", lambda: tmp_path / "file" / "cache")
    with pytest.raises(ModuleError, match=r"cannot make the folder .*Not a directory"):
        modules.find(GENERIC)


def test_a_failed_build_leaves_nothing(places, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("the linker died")

    monkeypatch.setattr(build.tvm.support.cc, "create_shared", fails)
    with pytest.raises(RuntimeError, match="the linker died"):
        modules.find_cpu()
    assert list(places[2].iterdir()) == []
    monkeypatch.undo()


def test_cross_building_needs_a_cross_linker(monkeypatch):
    other = next(arch for arch in isa.LADDER if arch != ARCH)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ModuleError, match=f"linking modules for {other} needs {other}-linux-gnu-gcc; .*install gcc-"):
        build.linker(other)
    with pytest.raises(ModuleError, match=f"linking modules for {ARCH} needs .* or cc or .*install gcc"):
        build.linker(ARCH)


@pytest.mark.parametrize(
    ("levels", "arch", "message"),
    [
        (["amx9"], None, r"no kernels for level amx9 of \w+; expected one of \['"),
        (None, "riscv64", "unknown architecture 'riscv64'; expected one of"),
    ],
)
def test_builds_that_cannot_be(levels, arch, message, tmp_path):
    with pytest.raises(ModuleError, match=message):
        modules.build_all(tmp_path / "out", levels, arch, print)
    assert not (tmp_path / "out").exists()


def python(code, **environment):
    """Run ``code`` in a new process in which apache-tvm cannot be imported."""
    code = "import sys; sys.modules['tvm'] = None\n" + code
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)


LAYER = """
from tests.helpers import assert_matches_reference, make_case
from tvm_moe import kernels
for dtype in ("int8", "bf16"):
    case = make_case(dtype=dtype)
    assert_matches_reference(case.run(case.pack(kernels.find("generic", dtype))), case)
print("served", sys.modules["tvm"], "tvm_moe.compiler" in sys.modules)
"""


def test_a_prebuilt_module_needs_no_compiler(built, tmp_path):
    done = python(LAYER, TVM_MOE_MODULES=str(built), XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout == "served None False\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_module_and_compiler_the_error_says_what_to_do(tmp_path):
    done = python(LAYER, XDG_CACHE_HOME=str(tmp_path), TVM_MOE_MODULES="")
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("tvm_moe.errors.ModuleError: no prebuilt module for ")
    assert "pip install 'tvm_moe[build]'" in error


def test_processes_that_build_at_once(tmp_path):
    """Each builds beside and renames: all of them end up with a whole module, and nothing is left over."""
    code, name = "from tvm_moe import modules; print(modules.find_cpu())", modules.filename(None, ARCH)
    command, environment = [sys.executable, "-W", "ignore", "-c", code], os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop(modules.ENVIRONMENT, None)
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) for _ in range(2)]
    paths = {process.communicate()[0] for process in both}
    (folder,) = (tmp_path / "tvm_moe").iterdir()
    assert paths == {f"{folder / name}\n"}
    assert sorted(p.name for p in folder.iterdir()) == sorted([name, name.replace(".so", ".json")])


def test_stamps_and_cache_keys_do_not_change_between_processes():
    shown = "[manifest.stamp(k) for k in kernels.TABLE], cache.source_hash()"
    code = f"from tvm_moe import cache, kernels, manifest; print({shown})"
    seen = {python(code, PYTHONHASHSEED=seed).stdout for seed in ("0", "1", "2")}
    assert seen == {f"{[manifest.stamp(k) for k in kernels.TABLE]} {cache.source_hash()}\n"}


def test_the_cache_key_is_that_of_the_sources(monkeypatch, tmp_path):
    keys = set()
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    for content in ("", "NR = 32", "NR = 64"):
        (tmp_path / "plan.py").write_text(content)
        keys.add(cache.source_hash())
    monkeypatch.setattr(cache, "TVM_VERSION", "0.28")
    keys.add(cache.source_hash())
    assert len(keys) == 4


def test_all_of_the_compiler_is_in_the_cache_key():
    """A file that the building half gains, in whatever folder, is hashed with the others."""
    package = ROOT / "tvm_moe"
    hashed = {file for pattern in cache.SOURCES for file in package.glob(pattern)}
    tables = {package / name for name in ("kernels.py", "plan.py", "activations.py")}
    assert {*(package / "compiler").rglob("*.py"), *(package / "schedules").rglob("*.py"), *tables} <= hashed
