"""Module files: where they are found, what makes one trustworthy, how one is built, and what happens without a compiler."""

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

from tvm_moe import ModuleError, SlowPathWarning, isa, kernels, manifest, modules, runtime
from tvm_moe.compiler import build

ROOT = Path(__file__).parent.parent
ARCH = isa.machine()
GENERIC = kernels.find("generic", "bf16")
NAME = modules.filename(GENERIC, ARCH)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the modules of the generic rows, made once."""
    folder = tmp_path_factory.mktemp("built")
    modules.build_all(folder, ["generic"], ARCH, lambda path: None)
    return folder


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Empty folders in the look-up order: explicit, packaged, cache."""
    folders = [tmp_path / name for name in ("explicit", "packaged", "cache")]
    for folder in folders:
        folder.mkdir(mode=0o755)
    monkeypatch.setenv(modules.ENVIRONMENT, str(folders[0]))
    monkeypatch.setattr(modules, "PACKAGED", folders[1])
    monkeypatch.setattr(modules, "cache_folder", lambda: folders[2])
    return folders


def put(built, folder, name=NAME):
    for suffix in (".so", ".json"):
        shutil.copy(built / Path(name).with_suffix(suffix), folder)
    return folder / name


def rewrite_manifest(path, **changes):
    file = path.with_suffix(".json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_order_of_places(built, places):
    """Explicit, packaged, cache; each serves where those before it have nothing."""
    paths = [put(built, folder) for folder in places]
    for path in paths:
        assert modules.existing(GENERIC) == modules.find(GENERIC) == path
        path.with_suffix(".json").unlink()  # without its manifest a file is an unfinished one
    assert modules.existing(GENERIC) is None


def test_a_module_is_served_as_it_was_built(built, places):
    module = runtime.Module(modules.find(GENERIC) if put(built, places[1]) else None)
    assert module.path == places[1] / NAME
    assert module.threads() >= 1


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is damaged: SHA-256 .*its manifest says"),
        (lambda p: p.write_bytes(b""), "is damaged"),
        (lambda p: flip(p, 5000), "is damaged"),
        (lambda p: p.unlink(), "no module file"),
        (lambda p: p.with_suffix(".json").write_text("{"), "no readable manifest"),
        (lambda p: p.with_suffix(".json").write_text("[]"), "no readable manifest"),
        (lambda p: p.with_suffix(".json").write_text("null"), "no readable manifest"),
        (lambda p: p.with_suffix(".json").write_bytes(b"\xff\xfe\x00"), "no readable manifest"),
        (lambda p: p.with_suffix(".json").write_text('{"sha256": "0"}'), "no readable manifest .*'stamp'"),
        (lambda p: rewrite_manifest(p, stamp="0123"), "built for another version of tvm_moe .*stamp 0123, expected"),
    ],
)
def test_damaged_files_are_refused(built, places, place, damage, message):
    path = put(built, places[place])
    damage(path)
    with pytest.raises(ModuleError, match=message) as error:
        modules.find(GENERIC)
    assert str(places[place]) in str(error.value)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_module_of_another_row_is_refused(built, places):
    other = modules.filename(kernels.find("generic", "int8"), ARCH)
    for suffix in (".so", ".json"):
        shutil.copy(built / Path(other).with_suffix(suffix), places[0] / Path(NAME).with_suffix(suffix))
    with pytest.raises(ModuleError, match="built for another version"):
        modules.find(GENERIC)


@pytest.mark.parametrize(
    "content",
    [b"#!/bin/sh\n", b"\x7fELF" + b"\0" * 200, lambda built: (built / modules.filename(None, ARCH)).read_bytes()],
)
def test_files_that_cannot_be_loaded(built, tmp_path, content):
    """Whole as far as their manifest knows: no library, half a library, a library of other functions."""
    path = tmp_path / NAME
    path.write_bytes(content(built) if callable(content) else content)
    manifest.write_manifest(path, GENERIC, ARCH)
    with pytest.raises(ModuleError, match=r"cannot be loaded as a tvm_moe module: .*build it again"):
        runtime.Module(manifest.check(path, GENERIC))


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
def test_folders_that_others_can_write_to_are_refused(built, places, place, mode):
    """The sticky bit does not help: others could put a module of theirs where there is none yet."""
    put(built, places[place])
    places[place].chmod(mode)
    with pytest.raises(ModuleError, match=r"refusing to load modules from .*others can write to it; run chmod go-w"):
        modules.find(GENERIC)


def test_folders_of_other_users_are_refused(built, places, monkeypatch):
    put(built, places[2])
    owner = places[2].stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:
        assert modules.find(GENERIC)  # root's folders are as good as one's own
        os.chown(places[2], 12345, -1)
    with pytest.raises(ModuleError, match=r"it belongs to user \d+, not to you"):
        modules.find(GENERIC)


def test_an_explicit_folder_that_is_none(places, monkeypatch):
    monkeypatch.setenv(modules.ENVIRONMENT, str(places[0] / "absent"))
    with pytest.raises(ModuleError, match=r"TVM_MOE_MODULES=.*absent is no folder"):
        modules.find(GENERIC)


def test_a_missing_module_is_built_into_the_cache_and_announced(places):
    with pytest.warns(SlowPathWarning, match=f"building {NAME} into {places[2]}"):
        path = modules.find(GENERIC)
    assert path == places[2] / NAME
    assert sorted(p.name for p in places[2].iterdir()) == sorted([NAME, NAME.replace(".so", ".json")])
    assert places[2].stat().st_mode & 0o022 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert modules.find(GENERIC) == path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == json.loads(path.with_suffix(".json").read_text())["sha256"]


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
    with pytest.raises(
        ModuleError, match=f"linking a {other} module needs one of .*{other}-linux-gnu-gcc.*install gcc"
    ):
        build.linker(other)


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
    shown = "[manifest.stamp(k) for k in kernels.TABLE], modules.source_hash()"
    code = f"from tvm_moe import kernels, manifest, modules; print({shown})"
    seen = {python(code, PYTHONHASHSEED=seed).stdout for seed in ("0", "1", "2")}
    assert seen == {f"{[manifest.stamp(k) for k in kernels.TABLE]} {modules.source_hash()}\n"}


def test_the_cache_key_is_that_of_the_sources(monkeypatch, tmp_path):
    keys = set()
    monkeypatch.setattr(modules, "__file__", str(tmp_path / "modules.py"))
    for content in ("", "NR = 32", "NR = 64"):
        (tmp_path / "plan.py").write_text(content)
        keys.add(modules.source_hash())
    monkeypatch.setattr(modules, "TVM_VERSION", "0.28")
    keys.add(modules.source_hash())
    assert len(keys) == 4


def test_all_of_the_compiler_is_in_the_cache_key():
    """A file that the building half gains, in whatever folder, is hashed with the others."""
    package = ROOT / "tvm_moe"
    hashed = {file for pattern in modules.SOURCES for file in package.glob(pattern)}
    tables = {package / name for name in ("kernels.py", "plan.py", "activations.py")}
    assert {*(package / "compiler").rglob("*.py"), *(package / "schedules").rglob("*.py"), *tables} <= hashed
