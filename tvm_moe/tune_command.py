"""``tvm-moe tune``: which tasks, how long they will take, progress, what is kept, and the modules built from it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import isa as levels
from . import kernels, models, modules, threads, tuning
from .errors import MoEError
from .manifest import TVM_VERSION
from .tuning import Record

FIRST_GUESS_SECONDS = 2.0  # a trial, before any has run: building takes most of it
FILE_WIDTH = 130  # of the table in a file; a terminal has its own
BLOCKS = (
    "A pass has blocks of one tile; of two where rows exceed half of the largest tile's, of eight where they are its."
)
WORK = "work"  # in the log's folder: MetaSchedule's whole database; not committed


def tune(
    model: Sequence[str], shapes: Sequence[str], checkpoint: Path | None, dtype: Sequence[str], trials: int,
    count: int | None, isa: str | None, out: Path | None, counted: str | None, to_stderr: bool,
) -> dict[str, Any]:  # fmt: skip
    """Tune and write ``out``; the log as plain data. ``counted``: for this AArch64 CPU, by executed instructions."""
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    layers = wanted_layers(model, shapes, checkpoint)
    dtypes = wanted_dtypes(dtype, isa)
    modules.require_compiler("tuning")
    from .compiler import trial
    from .compiler import tune as tuner

    cpu, cpu_key = (counted, tuning.named_arm_key(counted)) if counted else (cpu_name(), tuning.cpu_key())
    arch = "aarch64" if counted else kernels.machine()
    gauge = trial.Counter() if counted else trial.Clock()  # what is missing is said before anything is written
    folder = out or Path("tune_logs") / cpu
    work = folder / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoEError(f"--out {folder}: cannot be made ({error.strerror}); give another folder") from None
    count = 1 if counted else count or threads.get_num_threads()
    rows = [
        kernels.find_on(arch, isa or kernels.LADDER[arch][-1], d) if counted else levels.choose(d, isa).kernel
        for d in dtypes
    ]
    tasks = [task for kernel in rows for task in tuner.tasks(kernel, layers)]
    done = known_records(folder, cpu_key)
    console.print(f"{len(tasks)} tasks of {trials} trials on {cpu}, {count} threads: at most about "
                  f"{len(tasks) * trials * FIRST_GUESS_SECONDS / 60:.0f} min; {folder}", highlight=False)  # fmt: skip
    fresh: list[Record] = []
    with progress(console) as bar, closing(gauge):
        described = about(cpu, cpu_key, count, gauge)
        line = bar.add_task("tuning", total=len(tasks))
        for task in tasks:
            bar.update(line, description=f"{task.label}, {sum(bool(r.decisions) for r in fresh)} improved")
            made = tuner.tune(task, arch, count, trials, work, gauge, console.print)
            fresh.append(made)
            done[key(made)] = made
            tuning.write(folder, described, sorted(done.values(), key=key))
            bar.advance(line)
    tuner.prune(work, folder, arch, zip(tasks, fresh, strict=True))
    console.print(table(fresh, described))
    for kernel in () if counted else rows:
        modules.make_folder(modules.cache_folder())
        modules.build_tuned(kernel, kernels.machine(), modules.cache_folder(), [tuning.read(folder)], console.print)
    return {"folder": str(folder), "records": [asdict(r) | {"decisions": dict(r.decisions)} for r in fresh]}


def wanted_layers(model: Sequence[str], shapes: Sequence[str], checkpoint: Path | None) -> list[tuple[int, int]]:
    """(H, I) of every layer asked for."""
    from .bench.command import DEFAULT_MODEL, split
    from .bench.options import shape as parse_shape

    names = split(model) or (() if shapes or checkpoint else (DEFAULT_MODEL,))
    found = [models.find(name) for name in names] + [parse_shape(text) for text in shapes]
    layers = [(layer.H, layer.I) for layer in found]
    if checkpoint is not None:
        from . import checkpoint as checkpoints

        opened = checkpoints.open(checkpoint)
        readers = [opened.layer(i) for i in opened.layers]
        layers += sorted({(reader.hidden_size, reader.intermediate_size) for reader in readers})
    return layers


def wanted_dtypes(values: Sequence[str], isa: str | None) -> list[str]:
    """Those asked for; else all that the level has."""
    from .bench.command import split

    dtypes = list(split(values) or kernels.dtypes_of(isa))
    if unknown := [d for d in dtypes if d not in kernels.DTYPES]:
        raise MoEError(f"unknown dtype {unknown[0]!r}; expected {' or '.join(kernels.DTYPES)}")
    return dtypes


def cpu_name() -> str:
    """LLVM's name of this CPU."""
    from tvm.target import codegen

    return codegen.llvm_get_system_cpu()


def known_records(folder: Path, cpu_key: list[Any]) -> dict[tuple[Any, ...], Record]:
    """What an earlier run has found for this CPU; the log of another CPU is refused."""
    if not (folder / tuning.MANIFEST).exists():
        return {}
    found = tuning.read_json(folder / tuning.MANIFEST).get("cpu_key")
    if found != cpu_key:
        raise MoEError(f"{folder} holds the log of another CPU ({found}, expected {cpu_key}); give another --out")
    return {key(r): r for r in tuning.read(folder).records}


def key(r: Record) -> tuple[Any, ...]:
    return r.kernel, r.stage, r.K, r.rows


def about(cpu: str, cpu_key: list[Any], count: int, gauge: Any) -> dict[str, Any]:
    """What the manifest says of the machine and of what was measured, by a `trial.Gauge`."""
    import tvm

    return {
        "cpu": cpu, "cpu_key": cpu_key, "brand": levels.brand() if gauge.unit == "us" else "", "threads": count,
        "tvm": TVM_VERSION,
        "llvm": tvm.get_global_func("target.llvm_version_major")(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "unit": gauge.unit, "measured": gauge.measured,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def table(found: Iterable[Record], described: dict[str, Any]) -> Table:
    made = Table(title="default -> tuned", caption=f"{described['unit']}; {described['measured']}. {BLOCKS}")
    for name in ("dtype", "stage", "K", "rows", "default", "tuned", "ratio", "decisions"):
        made.add_column(name, no_wrap=True)
    for r in found:
        decisions = ", ".join(f"{name}={value}" for name, value in r.decisions) or "default"
        times = (f"{r.default:.0f}", f"{r.tuned:.0f}", f"{r.default / r.tuned:.3f}")
        made.add_row(r.kernel.partition("_")[0], r.stage, str(r.K), str(r.rows), *times, decisions)
    return made
