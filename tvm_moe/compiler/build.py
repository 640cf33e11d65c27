"""Export: one runtime module per (micro-kernel row, architecture), linked with the OpenMP launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm
import tvm.support

from ..errors import ModuleError
from ..kernels import MicroKernel
from ..manifest import write_manifest
from . import launcher
from .module import build_ir
from .pipeline import PIPELINE

Functions = Callable[[MicroKernel, str], tvm.IRModule]
LINKERS = ("cc", "gcc", "clang")


def target(kernel: MicroKernel, arch: str, **options: int) -> tvm.target.Target:
    """The code generation target: the row's CPU or features, or the baseline; never the build host's features."""
    named: dict[str, Any] = {"kind": "llvm", "mtriple": f"{arch}-linux-gnu", **options}
    if (cpu := kernel.mcpu(arch)).startswith("+"):
        named["mattr"] = cpu.split(",")
    elif cpu:
        named["mcpu"] = cpu
    if kernel.model:
        named["mcpu"], *without = kernel.model.split(",")
        named["mattr"] += without
    return tvm.target.Target(named)


def compile_kernel(kernel: MicroKernel, arch: str, functions: Functions = build_ir) -> tvm.runtime.Executable:
    """All functions of the row, compiled in memory."""
    return tvm.compile(functions(kernel, arch), tir_pipeline=PIPELINE, target=target(kernel, arch))


def linker(arch: str) -> str:
    """A C compiler driver that links shared libraries for ``arch``."""
    cross = f"{arch}-linux-gnu-gcc"
    candidates = (cross, *LINKERS) if arch == os.uname().machine else (cross,)
    for name in candidates:
        if found := shutil.which(name):
            return found
    package = f"gcc-{arch.replace('_', '-')}-linux-gnu" if len(candidates) == 1 else "gcc"
    raise ModuleError(
        f"linking modules for {arch} needs {' or '.join(candidates)}; install it (Debian: apt-get install {package})"
    )


def launcher_object(arch: str, folder: Path) -> Path:
    """The launcher, compiled by TVM's LLVM."""
    source, made = folder / "launcher.ll", folder / "launcher.o"
    source.write_text(launcher.llvm_ir(arch))
    tvm.runtime.load_module(str(source)).write_to_file(str(made))
    return made


def export(kernel: MicroKernel, arch: str, path: Path, functions: Functions = build_ir) -> Path:
    """Build the module of a row into ``path`` and its manifest; beside it first, then renamed: no one sees half a file."""
    executable = compile_kernel(kernel, arch, functions)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as work:
        made = Path(work, "module.so")
        executable.export_library(str(made), addons=[str(launcher_object(arch, Path(work)))], cc=linker(arch))
        made.chmod(0o644)
        made.replace(path)
    write_manifest(path, kernel, arch)
    return path


def export_cpu(arch: str, path: Path) -> Path:
    """The launcher alone as a library: what detection of CPU features needs before any kernel is chosen."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as work:
        made = Path(work, "cpu.so")
        tvm.support.cc.create_shared(str(made), [str(launcher_object(arch, Path(work)))], cc=linker(arch))
        made.chmod(0o644)
        made.replace(path)
    write_manifest(path, None, arch)
    return path
