"""An AArch64 Python with apache-tvm-ffi and numpy: Debian packages and wheels, unpacked into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from ..cache import root
from ..errors import EmulationError

PACKAGE = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.13", "3.12", "3.14")  # Debian 12 has the first one, Debian 13 the second
DEBS = ("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libgomp1")
WHEELS = ("apache-tvm-ffi==0.1.14.post1", "numpy", "typing-extensions")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
TIMEOUT_SECONDS = 900


def fetch(command: list[str], where: Path, needed: bool = True) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, cwd=where)
    if done.returncode and needed:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise EmulationError(f"no AArch64 Python: {' '.join(command[:2])} failed: {' '.join(last)}")
    return not done.returncode


def unpack_debs(work: Path) -> str:
    """Debian's packages; returns the version of Python among them."""
    apt = shutil.which("apt-get")
    if apt is None:
        raise EmulationError("no AArch64 Python: needs apt-get, which fetches Debian's packages")
    for name in ("lists/partial", "cache/archives/partial", "debs", "sysroot"):
        (work / name).mkdir(parents=True, exist_ok=True)
    (work / "status").touch()
    options = {
        "Dir::State::Lists": work / "lists", "Dir::State::status": work / "status", "Dir::Cache": work / "cache",
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "root",
    }  # fmt: skip
    base = [apt, "-q", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    fetch([*base, "update"], work)
    for version in PYTHONS:
        packages = [*DEBS, f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib"]
        download = [*base, "download", *(f"{name}:arm64" for name in packages)]
        if fetch(download, work / "debs", needed=version == PYTHONS[-1]):
            break
    for deb in (work / "debs").glob("*.deb"):
        fetch(["dpkg-deb", "-x", str(deb), str(work / "sysroot")], work)
    return version


def unpack_wheels(work: Path, version: str) -> None:
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:"]
    fetch([*pip, "--python-version", version, *platforms, "--target", str(work / "site"), *WHEELS], work)


def qemu(plugins: bool = False) -> str:
    """qemu for AArch64 programs; only the dynamically linked one takes ``plugins``."""
    names = ("qemu-aarch64",) if plugins else ("qemu-aarch64", "qemu-aarch64-static")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise EmulationError(f"needs {' or '.join(names)} (Debian: apt-get install qemu-user)")
    return found


@cache
def installed() -> tuple[Path, Path]:
    """Sysroot and site-packages; made once, elsewhere first, so that nobody sees half of it."""
    qemu()
    made = root() / "aarch64"
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


def command(*arguments: str, cpu: str = "max", plugin: str | None = None) -> list[str]:
    """The emulated Python with ``arguments`` on a CPU that qemu knows, under a plugin (``FILE,option=value``)."""
    sysroot, _ = installed()
    program = next((sysroot / "usr/bin").glob("python3.*"))
    plugins = [] if plugin is None else ["-plugin", plugin]
    return [qemu(plugin is not None), "-cpu", cpu, "-L", str(sysroot), *plugins, str(program), *arguments]


def environment(**more: str) -> dict[str, str]:
    """All that it gets: the wheels and this package, two threads, and ``more``."""
    _, site = installed()
    return {
        "PYTHONPATH": os.pathsep.join([str(site), str(PACKAGE)]),
        "HOME": str(root()),
        "OMP_NUM_THREADS": "2",
    } | more


def execute(script: str, *arguments: str, cpu: str = "max", **more: str) -> subprocess.CompletedProcess[str]:
    """``script`` in that Python."""
    called = command("-c", script, *arguments, cpu=cpu)
    return subprocess.run(called, capture_output=True, text=True, env=environment(**more), timeout=TIMEOUT_SECONDS)
