"""Kernel module files: where they are looked for, what makes one trustworthy, and how a missing one is built.

A layer asks for the module tuned for its shape, then for the shape-generic one. Look-up order of a file: the folder in
TVM_MOE_MODULES (what ``tvm-moe build --out`` wrote) -> the package's own prebuilt modules ->
the user's cache, where a missing module is built on the spot, and announced, if the compiler is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from . import kernels
from .cache import cache_folder, mark_used, prune
from .errors import ModuleError, SlowPathWarning
from .kernels import MicroKernel
from .manifest import check, check_folder
from .tuning import ENVIRONMENT as LOGS_ENVIRONMENT
from .tuning import Choice, Logs, variants

ENVIRONMENT = "TVM_MOE_MODULES"
PACKAGED = Path(__file__).parent / "prebuilt"


def filename(kernel: MicroKernel | None, arch: str, kind: str = "") -> str:
    """``kind``: "" for the layer's functions, "-<variant>" for tuned ones, "-probe" for those that measure the machine."""
    return f"{arch}-{kernel.key if kernel else 'cpu'}{kind}.so"


def find(kernel: MicroKernel) -> Path:
    """The checked module file of ``kernel`` for this machine, built into the cache where none exists."""
    return _find(kernel, lambda path, arch: _build(kernel, path, arch))


def find_tuned(kernel: MicroKernel, variant: str) -> Path | None:
    """The checked module with these tuned decisions; None where nobody has built it: that is never done on the spot.

    The folder that serves the shape-generic module is the last one looked at, so that a wheel never asks for the cache,
    whose name takes reading all sources; but the user's own logs may have their modules anywhere.
    """
    names = [filename(kernel, kernels.machine(), kind) for kind in (f"-{variant}", "")]
    for folder in folders() if variant else ():
        tuned, generic = ((folder / name).with_suffix(".json").exists() for name in names)
        if tuned:
            return _checked(folder / names[0], kernel)
        if generic and not os.environ.get(LOGS_ENVIRONMENT):
            return None
    return None


def find_probe(kernel: MicroKernel) -> Path:
    """The module that measures what this machine does at most with ``kernel``'s instruction (the benchmark's)."""
    return _find(kernel, lambda path, arch: _build_probe(kernel, path, arch), "-probe")


def find_cpu() -> Path:
    """The tiny library that reads CPUID and XGETBV."""
    return _find(None, _build_cpu)


def folders() -> Iterator[Path]:
    """Where modules are looked for, in order; one by one, as the cache's name takes reading all sources."""
    if explicit := os.environ.get(ENVIRONMENT):
        if not Path(explicit).is_dir():
            raise ModuleError(f"{ENVIRONMENT}={explicit} is no folder; unset it or build with tvm-moe build --out")
        yield Path(explicit)
    yield PACKAGED
    yield cache_folder()


def existing(kernel: MicroKernel | None, kind: str = "") -> Path | None:
    """The file that serves ``kernel`` here, None where it would have to be built; not checked yet."""
    name = filename(kernel, kernels.machine(), kind)
    return next((place / name for place in folders() if (place / name).with_suffix(".json").exists()), None)


def _find(kernel: MicroKernel | None, build: Callable[[Path, str], object], kind: str = "") -> Path:
    try:
        path = existing(kernel, kind)
    except OSError as error:
        raise ModuleError(f"cannot look for kernel modules: {error}; make the folder readable (chmod go+rX)") from error
    if path is None:
        path = cache_folder() / filename(kernel, kernels.machine(), kind)
        make_folder(path.parent)
        try:
            build(path, kernels.machine())
        except PermissionError as error:
            raise ModuleError(
                f"cannot build {path.name} into {path.parent}: {error.strerror}; set XDG_CACHE_HOME"
            ) from error
        prune(path.parent)
    return _checked(path, kernel)


def _checked(path: Path, kernel: MicroKernel | None) -> Path:
    check(path, kernel)
    if path.parent != PACKAGED:
        for place in (path.parent, path):
            check_folder(place)
        mark_used(path.parent)
    return path


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """A folder for modules that only we can write to."""
    try:
        if not folder.parent.exists():  # else the user's umask would decide who can write to it
            folder.parent.mkdir(parents=True, exist_ok=True, mode=mode)
        folder.mkdir(exist_ok=True, mode=mode)
    except OSError as error:
        raise ModuleError(f"cannot make the folder {folder} for modules: {error.strerror}") from error
    check_folder(folder)


def require_compiler(wanted: str) -> None:
    if importlib.util.find_spec("tvm") is None:
        raise ModuleError(
            f"no prebuilt module for {wanted}, and no compiler to build one: pip install 'tvm_moe[build]', or point "
            f"{ENVIRONMENT} at a folder that tvm-moe build --out has written"
        )


def build_all(
    out: Path, levels: Iterable[str] | None, arch: str | None, progress: Callable[[Path], object],
    logs: Iterable[Logs] = (),
) -> list[Path]:  # fmt: skip
    """Build the modules of ``levels`` (None: every level) of an architecture into ``out``; cross-building included.

    What the cache has of these sources is copied. ``logs``: of CPUs for whose tuned decisions modules are built, too.
    """
    arch = arch or kernels.machine()
    if arch not in kernels.LADDER:
        raise ModuleError(f"unknown architecture {arch!r}; expected one of {sorted(kernels.LADDER)}")
    rows = [k for k in kernels.TABLE if arch in k.arches]
    known = sorted({k.isa for k in rows})
    if unknown := sorted(set(levels or ()) - set(known)):
        elsewhere = [a for a, levels_of in kernels.LADDER.items() if a != arch and set(unknown) <= set(levels_of)]
        hint = f", or --arch {elsewhere[0]}" if elsewhere else ""
        raise ModuleError(f"no kernels for level {', '.join(unknown)} of {arch}; expected one of {known}{hint}")
    require_compiler(f"{arch} modules")
    from .compiler import build

    make_folder(out, 0o755)  # a server under another user reads it
    made = []
    for kernel in (None, *(k for k in rows if not levels or k.isa in levels)):
        path = out / filename(kernel, arch)
        if not copied(path, kernel):
            build.export_cpu(arch, path) if kernel is None else build.export(kernel, arch, path)
        made.append(path)
        progress(path)
        made += build_tuned(kernel, arch, out, logs, progress) if kernel else ()
    return made


def copied(path: Path, kernel: MicroKernel | None) -> bool:
    """Whether the cache had this file, whole and of these sources, and gave it to ``path``."""
    suffixes = ".so", ".json"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as work:
        try:
            found = _checked(cache_folder() / path.name, kernel)
            made = [shutil.copyfile(found.with_suffix(suffix), Path(work, f"module{suffix}")) for suffix in suffixes]
        except (ModuleError, OSError):  # none, damaged, not ours to read, or removed meanwhile
            return False
        for file, suffix in zip(made, suffixes, strict=True):  # renamed: no one sees half a file
            file.chmod(0o644)
            file.replace(path.with_suffix(suffix))
    return True


def build_tuned(
    kernel: MicroKernel, arch: str, out: Path, logs: Iterable[Logs], progress: Callable[[Path], object]
) -> list[Path]:
    """The modules of a row with the decisions of these logs, each combination once."""
    from .compiler import build, module

    wanted: dict[str, Choice] = {}
    for log in logs:
        wanted |= variants(kernel, log)
    made = []
    for variant, choice in sorted(wanted.items()):
        path = out / filename(kernel, arch, f"-{variant}")
        made.append(build.export(kernel, arch, path, partial(module.build_ir, chosen=choice)))
        progress(path)
    return made


def _build(kernel: MicroKernel, path: Path, arch: str) -> None:
    require_compiler(f"{arch}-{kernel.key}")
    warnings.warn(
        f"tvm_moe: building {path.name} into {path.parent} (about 15 s, once; prebuild with tvm-moe build)",
        SlowPathWarning, stacklevel=4,
    )  # fmt: skip
    from .compiler import build

    build.export(kernel, arch, path)


def _build_probe(kernel: MicroKernel, path: Path, arch: str) -> None:
    require_compiler(f"the probes of {arch}-{kernel.key}")
    from .compiler import build, probe

    build.export(kernel, arch, path, probe.build_ir)


def _build_cpu(path: Path, arch: str) -> None:
    require_compiler(f"{arch}-cpu")
    from .compiler import build

    build.export_cpu(arch, path)
