"""Module files: where they are found, and what makes one trustworthy enough to be loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tvm_moe import ModuleError, cache, isa, kernels, manifest, modules, runtime

ROOT = Path(__file__).parent.parent
ARCH = isa.machine()
GENERIC = kernels.find("generic", "bf16")
NAME = modules.filename(GENERIC, ARCH)


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


def test_the_sources_are_read_for_the_cache_alone(built, places, monkeypatch):
    """Not where a module before it serves: a server may have no home, and need not hash a compiler it never runs."""
    monkeypatch.setattr(modules, "cache_folder", lambda: pytest.fail("the cache was looked for"))
    for folder in reversed(places[:2]):
        path = put(built, folder)
        assert modules.find(GENERIC) == path


def test_a_user_without_home(places, monkeypatch):
    monkeypatch.setattr(modules, "cache_folder", cache.cache_folder)
    monkeypatch.setattr(Path, "home", lambda: Path("~absent").expanduser())
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ModuleError, match=r"no folder for a cache .*home directory.*set HOME or XDG_CACHE_HOME"):
        modules.find(GENERIC)


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
        (lambda p: rewrite_manifest(p, arch="sparc"), "is for sparc, this machine is "),
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
    with pytest.raises(ModuleError, match=r"it belongs to user \d+; expected you or root"):
        modules.find(GENERIC)


def test_an_explicit_folder_that_is_none(places, monkeypatch):
    monkeypatch.setenv(modules.ENVIRONMENT, str(places[0] / "absent"))
    with pytest.raises(ModuleError, match=r"TVM_MOE_MODULES=.*absent is no folder"):
        modules.find(GENERIC)
