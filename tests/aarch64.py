"""An AArch64 Python under qemu-user: Debian packages and wheels unpacked into the user's cache, nothing installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import downloads

ROOT = Path(__file__).parent.parent
QEMUS = ("qemu-aarch64-static", "qemu-aarch64")
PYTHONS = ("3.11", "3.13", "3.12", "3.14")  # Debian 12 has the first one, Debian 13 the second
DEBS = ("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libgomp1")
WHEELS = ("apache-tvm-ffi==0.1.14.post1", "numpy", "typing-extensions")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


def folder() -> Path:
    return downloads() / "aarch64"


def run(command: list[str], where: Path, needed: bool = True) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, cwd=where)
    if done.returncode and needed:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        pytest.skip(f"no AArch64 Python: {' '.join(command[:2])} failed: {' '.join(last)}")
    return not done.returncode


def unpack_debs(work: Path) -> str:
    """Debian's packages; returns the version of Python among them."""
    apt = shutil.which("apt-get")
    if apt is None:
        pytest.skip("no AArch64 Python: needs apt-get, which fetches Debian's packages")
    for name in ("lists/partial", "cache/archives/partial", "debs", "sysroot"):
        (work / name).mkdir(parents=True, exist_ok=True)
    (work / "status").touch()
    options = {
        "Dir::State::Lists": work / "lists", "Dir::State::status": work / "status", "Dir::Cache": work / "cache",
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root",
    }  # fmt: skip
    base = [apt, "-q", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    run([*base, "update"], work)
    for version in PYTHONS:
        packages = [*DEBS, f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib"]
        download = [*base, "download", *(f"{name}:arm64" for name in packages)]
        if run(download, work / "debs", needed=version == PYTHONS[-1]):
            break
    for deb in (work / "debs").glob("*.deb"):
        run(["dpkg-deb", "-x", str(deb), str(work / "sysroot")], work)
    return version


def unpack_wheels(work: Path, version: str) -> None:
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        version,
    ]
    run([*pip, *platforms, "--target", str(work / "site"), *WHEELS], work)


def qemu() -> str | None:
    return next(filter(None, map(shutil.which, QEMUS)), None)


@cache
def python() -> tuple[Path, Path]:
    """Sysroot and site-packages; made once, elsewhere first, so that nobody sees half of it."""
    if qemu() is None:
        pytest.skip(f"no AArch64 Python: needs {QEMUS[0]} (Debian: apt-get install qemu-user-static)")
    made = folder()
    if not made.is_dir():
        work = made.with_name(f"{made.name}-{os.getpid()}")
        work.mkdir(parents=True)
        try:
            unpack_wheels(work, unpack_debs(work))
            shutil.rmtree(work / "debs")
            work.rename(made)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return made / "sysroot", made / "site"


def execute(script: str, *arguments: str, cpu: str = "max", **environment: str) -> subprocess.CompletedProcess[str]:
    """``script`` in that Python on a CPU that qemu emulates; ``environment`` is all it gets."""
    sysroot, site = python()
    program = next((sysroot / "usr/bin").glob("python3.*"))
    command = [str(qemu()), "-cpu", cpu, "-L", str(sysroot), str(program), "-c", script, *arguments]
    paths = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "HOME": str(folder()), "OMP_NUM_THREADS": "2"}
    return subprocess.run(command, capture_output=True, text=True, env=paths | environment, timeout=300)
