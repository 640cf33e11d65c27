"""The user's cache of modules: one folder for each state of the sources that they are built from.

A folder's modification time says when it was used last (access times are often not kept); old ones are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
from functools import cache
from pathlib import Path

from .errors import ModuleError
from .manifest import TVM_VERSION

SOURCES = ("compiler/*.py", "compiler/*/*.py", "schedules/*.py", "kernels.py", "plan.py", "activations.py")
NAME = re.compile("[0-9a-f]{16}")
DAY = 24 * 3600
KEPT = 30 * DAY  # unused for longer: nobody goes back to these sources, and building again takes a minute


def source_hash() -> str:
    """Everything that determines the code of a built module."""
    digest = hashlib.sha256(TVM_VERSION.encode())
    package = Path(__file__).parent
    for pattern in SOURCES:
        for file in sorted(package.glob(pattern)):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def root() -> Path:
    """All of the cache."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ModuleError(f"no folder for a cache of modules ({error}); set HOME or XDG_CACHE_HOME") from error
    return Path(base) / "tvm_moe"


@cache
def own_hash() -> str:
    """`source_hash` when it was first asked for: later edits are not what this process has imported."""
    return source_hash()


def cache_folder() -> Path:
    """Where the modules of these sources are, or will be built."""
    return root() / own_hash()


def mark_used(folder: Path) -> None:
    """Note that modules of ``folder``, if it is one of the cache's, serve; once a day, so that look-ups do not write."""
    with contextlib.suppress(OSError, ModuleError):  # a cache that is read-only, or none
        if folder.parent == root() and time.time() - folder.stat().st_mtime > DAY:
            os.utime(folder)


def prune(current: Path) -> None:
    """Remove the folders beside ``current`` that have not been used for long; its failures are nobody's."""
    with contextlib.suppress(OSError, ModuleError):
        if current.parent == root() and _ours(root().stat()):
            for folder in root().iterdir():
                if folder != current and NAME.fullmatch(folder.name) and _stale(folder):
                    _remove(folder)


def _ours(status: os.stat_result) -> bool:
    """A folder that nobody else can change while it is being removed."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _stale(folder: Path) -> bool:
    status = folder.lstat()  # a symbolic link is no folder
    return _ours(status) and time.time() - status.st_mtime > KEPT


def _remove(folder: Path) -> None:
    """Manifests first: without one a module is an unfinished one, whenever this is interrupted."""
    for manifest in folder.glob("*.json"):
        manifest.unlink()
    shutil.rmtree(folder, ignore_errors=True)
