"""What becomes of the cache's old folders: those unused for 30 days are removed after a build, and nothing else is."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from tvm_moe import cache, isa, kernels, modules

GENERIC = kernels.find("generic", "bf16")
NAME = modules.filename(GENERIC, isa.machine())
OLD = "0123456789abcdef"


def age(path, days):
    then = time.time() - days * cache.DAY
    os.utime(path, (then, then), follow_symlinks=False)


def days_since_use(folder):
    return round((time.time() - folder.stat().st_mtime) / cache.DAY)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty cache whose modules are "built" from what is at hand."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(modules.ENVIRONMENT, raising=False)
    monkeypatch.setattr(modules, "PACKAGED", tmp_path / "none")
    cache.root().mkdir(mode=0o755)
    return cache.root()


@pytest.fixture
def build(built, monkeypatch):
    """Builds the missing module, and so prunes."""

    def copy(kernel, path, arch):
        for suffix in (".so", ".json"):
            shutil.copy((built / NAME).with_suffix(suffix), path.parent)

    monkeypatch.setattr(modules, "_build", copy)
    return lambda: modules.find(GENERIC)


def folder(root, name, days, mode=0o700):
    path = root / name
    path.mkdir(mode=mode)
    path.chmod(mode)
    for file in ("module.so", "module.json"):
        (path / file).write_text(name)
    (path / ".build-half").mkdir()
    age(path, days)
    return path


def test_a_build_removes_what_was_not_used_for_long(root, build):
    old, recent = folder(root, OLD, 31), folder(root, OLD[::-1], 29)
    path = build()
    assert set(root.iterdir()) == {path.parent, recent}
    assert not old.exists()
    assert len(list(recent.iterdir())) == 3


def test_a_look_up_removes_nothing(root, build):
    build()
    old = folder(root, OLD, 31)
    build()
    assert old.exists()


@pytest.mark.parametrize(
    ("name", "mode"),
    [("peers", 0o700), (OLD[:-1], 0o700), (OLD + "0", 0o700), (OLD.upper(), 0o700), (OLD, 0o770), (OLD, 0o707)],
)
def test_other_folders_stay(root, build, name, mode):
    """Of other names, or open to others, who may have put there what is not ours to remove."""
    other = folder(root, name, 400, mode)
    build()
    assert len(list(other.iterdir())) == 3


def test_folders_of_other_users_stay(root, build, monkeypatch):
    other = folder(root, OLD, 31)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: root.stat().st_uid + 1)
        cache.prune(root / "current")
    assert other.exists()
    build()
    assert not other.exists()


def test_files_and_links_stay_and_what_links_lead_to(root, build, tmp_path):
    target = folder(tmp_path, OLD, 31)
    (root / OLD).symlink_to(target)
    (root / OLD[::-1]).write_text("a file")
    for name in (OLD, OLD[::-1]):
        age(root / name, 31)
    build()
    assert len(list(target.iterdir())) == 3
    assert (root / OLD).is_symlink()
    assert (root / OLD[::-1]).is_file()


def test_a_cache_that_others_can_write_to_is_left_alone(root, build):
    """Between looking at a folder and removing it they could put another in its place."""
    old = folder(root, OLD, 31)
    root.chmod(0o775)
    build()
    assert old.exists()


def test_only_our_own_cache_is_pruned(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    old = folder(tmp_path / "elsewhere", OLD, 31)
    cache.prune(tmp_path / "elsewhere" / "current")
    assert old.exists()


@pytest.mark.parametrize("failing", ["lstat", "unlink", "iterdir"])
def test_a_build_does_not_fail_because_of_it(root, build, monkeypatch, failing):
    folder(root, OLD, 31)

    def fails(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache.Path, failing, fails)
    assert build().name == NAME


def test_manifests_go_first(root, build, monkeypatch):
    """What an interrupted removal leaves is never taken for a module."""
    old = folder(root, OLD, 31)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    build()
    assert sorted(p.name for p in old.iterdir()) == [".build-half", "module.so"]


def test_use_is_noted_once_a_day(root, build):
    used = build().parent
    for days, expected in ((40, 0), (2, 0), (0.6, 1)):
        age(used, days)
        assert build().parent == used
        assert days_since_use(used) == expected


def test_folders_of_the_user_are_not_touched(root, build, tmp_path, monkeypatch):
    explicit = tmp_path / "explicit"
    shutil.copytree(build().parent, explicit)
    monkeypatch.setenv(modules.ENVIRONMENT, str(explicit))
    age(explicit, 40)
    assert build().parent == explicit
    assert days_since_use(explicit) == 40


def test_a_new_cache_is_ours_alone_whatever_the_umask(root, build):
    root.rmdir()
    umask = os.umask(0o002)
    try:
        build()
    finally:
        os.umask(umask)
    assert cache._ours(root.stat())
