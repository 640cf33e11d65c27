"""The wheel: this package and, in its folder `prebuilt`, modules of every CPU level, so that serving needs no compiler.

Modules are built in a copy of the checkout. In the checkout itself they would serve on when the sources they were built
from have changed: the loader does not compare packaged modules with sources, which a server need not even read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated
from zipfile import ZipFile

import typer

from . import kernels, modules
from .errors import ModuleError, MoEError
from .tune_command import WORK
from .tuning import all_logs

ROOT = Path(__file__).parent.parent
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
LIMIT = 10_000_000  # bytes
GLIBC = (2, 28)  # at least: what torch's wheels need, so that an older tag would only fail later
SYMBOL = re.compile(rb"\0GLIBC_(\d+)\.(\d+)[.\d]*(?=\0)")
RELATIVE = b"\0GLIBC_ABI_DT_RELR\0", (2, 36)  # packed relocations, a default of some linkers


def copy_checkout(folder: Path) -> Path:
    """Copy what a wheel is built from; the folder in it, to be made, whose modules the wheel ships, whatever they are."""
    if missing := [name for name in FILES if not (ROOT / name).is_file()]:
        raise ModuleError(f"a wheel is built from a checkout; {ROOT} has no {', '.join(missing)}: clone the repository")
    junk = shutil.ignore_patterns("__pycache__", modules.PACKAGED.name, WORK)
    shutil.copytree(ROOT / "tvm_moe", folder / "tvm_moe", ignore=junk, copy_function=copy_file)
    for name in FILES:
        copy_file(ROOT / name, folder / name)
    return folder / "tvm_moe" / modules.PACKAGED.name


def copy_file(source: str | Path, target: str | Path) -> None:
    """The content alone: a clone's permissions depend on who made it, and a wheel records them."""
    shutil.copyfile(source, target)
    Path(target).chmod(0o644)


def glibc(file: Path) -> tuple[int, int]:
    """The newest version of glibc whose symbols ``file`` needs, as its dynamic string table names them."""
    content = file.read_bytes()
    needed = [(int(major), int(minor)) for major, minor in SYMBOL.findall(content)]
    return max([*needed, *([RELATIVE[1]] if RELATIVE[0] in content else []), (2, 0)])


def platform(prebuilt: Path, arch: str) -> str:
    """The wheel's platform tag: every system with the glibc that its modules need."""
    major, minor = max([GLIBC, *map(glibc, prebuilt.glob("*.so"))])
    return f"manylinux_{major}_{minor}_{arch}"


def pack(checkout: Path, tag: str | None, out: Path) -> Path:
    """Build the wheel of ``checkout`` into ``out``; the same files give the same bytes."""
    # torch has brought a setuptools that is new enough: nothing is downloaded.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    options = [f"--config-settings=--build-option=--plat-name={tag}"] if tag else []
    made = checkout / "made"
    done = subprocess.run(
        [*command, *options, "--wheel-dir", str(made), str(checkout)],
        env={"SOURCE_DATE_EPOCH": "315532800"} | os.environ,  # 1980, the first date an archive can hold
        umask=0o022, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise ModuleError(f"pip cannot build the wheel: {done.stderr.strip() or done.stdout.strip()}")
    (wheel,) = made.glob("*.whl")
    if wheel.stat().st_size > LIMIT:
        raise ModuleError(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {LIMIT:,}: ship fewer modules")
    return wheel.replace(out / wheel.name)


def work_folder(out: Path) -> tempfile.TemporaryDirectory[str]:
    """In ``out``: one that cannot be written to shows before the work, and the wheel, when done, is only renamed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=out, prefix=".build-")
    except OSError as error:
        raise ModuleError(f"cannot build a wheel into {out}: {error.strerror}; name another folder (--out)") from error


def build(out: Path, arch: str | None = None) -> Path:
    """Build the modules of an architecture (None: this machine's) and the wheel that ships them into ``out``."""
    with work_folder(out) as folder:
        prebuilt = copy_checkout(Path(folder))
        modules.build_all(prebuilt, None, arch, lambda path: typer.echo(f"built {path.name}", err=True), all_logs())
        return pack(Path(folder), platform(prebuilt, arch or kernels.machine()), out)


def sizes(wheel: Path) -> list[str]:
    """A line for each module file and one for the wheel."""
    shipped = [(entry.filename, entry.file_size) for entry in ZipFile(wheel).infolist()]
    prefix = f"tvm_moe/{modules.PACKAGED.name}/"
    files = [(name.removeprefix(prefix), size) for name, size in shipped if name.startswith(prefix)]
    return [f"{size:>10,}  {name}" for name, size in [*files, (str(wheel), wheel.stat().st_size)]]


def main(
    out: Annotated[Path, typer.Option(help="Folder for the wheel.")] = Path("dist"),
    arch: Annotated[str | None, typer.Option(help="x86_64 or aarch64. Default: this machine's.")] = None,
) -> None:
    """Build a wheel with kernel modules for every CPU level of an architecture; print what it ships, in bytes."""
    try:
        typer.echo("\n".join(sizes(build(out, arch))))
    except MoEError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
