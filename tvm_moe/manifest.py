"""What makes a module file trustworthy: a JSON manifest beside it with the interface stamp and the file's SHA-256, in a
folder that nobody else can write to.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from . import plan
from .errors import ModuleError
from .kernels import MicroKernel, machine

INTERFACE = 1  # raise when the signature or the meaning of an exported function changes
TVM_VERSION = "0.27.0.post1"  # what builds modules


def stamp(kernel: MicroKernel | None) -> str:
    """What a module and this package must agree on: exported functions, plan layout, the kernel's row."""
    text = f"{INTERFACE} {[f.name for f in plan.Field]} {row(kernel)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def row(kernel: MicroKernel | None) -> dict[str, object] | None:
    """Its fields; a set has no order of its own."""
    return {**vars(kernel), "features": sorted(kernel.features), "few": row(kernel.few)} if kernel else None


def write_manifest(path: Path, kernel: MicroKernel | None, arch: str) -> None:
    """Write ``path``'s manifest, atomically; last, so that a module without one is an unfinished one."""
    record = {
        "kernel": kernel.name if kernel else "cpu",
        "arch": arch,
        "stamp": stamp(kernel),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tvm": TVM_VERSION,
    }
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(record, file, indent=1)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path.with_suffix(".json"))


def check_folder(folder: Path) -> None:
    """Refuse a folder or file through which others could make us load code; a sticky folder lets them add files, too."""
    status = folder.stat()
    if status.st_mode & 0o022:
        raise ModuleError(f"refusing to load modules from {folder}: others can write to it; run chmod go-w {folder}")
    if status.st_uid not in (0, os.getuid()):
        raise ModuleError(
            f"refusing to load modules from {folder}: it belongs to user {status.st_uid}; expected you or root: copy it"
        )


def check(path: Path, kernel: MicroKernel | None) -> Path:
    """``path`` if it is whole and made for this package, else a ModuleError that says what is wrong with it."""
    manifest = path.with_suffix(".json")
    advice = "delete both files, or build them again with tvm-moe build"
    if not path.is_file():
        raise ModuleError(f"no module file {path}; build it with tvm-moe build")
    try:
        record = json.loads(manifest.read_text())
        expected, found, arch = str(record["sha256"]), record["stamp"], record["arch"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModuleError(f"{manifest}: no readable manifest for {path.name} ({error}); {advice}") from error
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != expected:
        raise ModuleError(
            f"{path} is damaged: SHA-256 {actual[:12]}..., its manifest says {expected[:12]}...; {advice}"
        )
    if arch != machine():
        raise ModuleError(
            f"{path} is for {arch}, this machine is {machine()}; build it for this one with tvm-moe build"
        )
    if found != stamp(kernel):
        raise ModuleError(
            f"{path} was built for another version of tvm_moe (stamp {found}, expected {stamp(kernel)}); {advice}"
        )
    return path
