"""The user's cache of modules: one folder for each state of the sources that they are built from."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from .errors import ModuleError
from .manifest import TVM_VERSION

SOURCES = ("compiler/*.py", "compiler/*/*.py", "schedules/*.py", "kernels.py", "plan.py", "activations.py")


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


def cache_folder() -> Path:
    """Where the modules of these sources are, or will be built."""
    return root() / source_hash()
