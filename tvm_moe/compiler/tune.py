"""MetaSchedule over the tile schedules' decisions: tasks, our builder and runner, the database, and what is kept of it.

The random sampler is enough: a task has a few dozen combinations, and each is measured as it serves. A record is kept
only where it beat the default when both were measured again, in turns.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from tvm_moe.schedules import style

from ..errors import MoEError
from ..kernels import TABLE, MicroKernel
from ..tuning import STAGES, Decisions, Record
from . import build, compute, intrin, stage
from .stage import Task
from .trial import Builder, Gauge, Meter, Runner, decisions_of

DUEL_PASSES = 15
WIN = 1.01  # a record must be this much faster than the default in turns with it, and faster in three turns of four
FAILED_SECONDS = 1e9  # MetaSchedule stores failed trials with 1e10
DATABASE = "database_workload.json", "database_tuning_record.json"  # MetaSchedule's own files
LOGGER = logging.getLogger("tvm_moe.tune")  # MetaSchedule's own loggers write to the console whatever is asked
Show = Callable[[str], None]


def tasks(kernel: MicroKernel, shapes: Iterable[tuple[int, int]]) -> list[Task]:
    """Every (stage, K, rows) that layers of these (H, I) need, each once."""
    sizes = {stage_name: sorted({shape[i] for shape in shapes}) for i, stage_name in enumerate(STAGES)}
    return [
        Task(kernel.isa, kernel.dtype, name, K, rows)
        for name, Ks in sizes.items() for K in Ks for rows in stage.buckets(kernel)
    ]  # fmt: skip


def without_defaults(task: Task, decisions: Decisions, arch: str) -> Decisions:
    kernel = task.serving
    defaults = {d.name: d.default for d in style(kernel.style)(kernel, arch, task.rows).decisions()}
    return tuple((name, value) for name, value in decisions if defaults[name] != value)


def workload(task: Task) -> tvm.IRModule:
    """The tile with fixed sizes. Stages with the same K are the same computation: a name tells their records apart."""
    func = compute.gemm_tile(task.serving, task.rows, task.groups)
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main").with_attr("moe_task", task.label)})


def spaces(task: Task, arch: str) -> Callable[[Schedule], list[Schedule]]:
    """A design space for every combination of the structural decisions."""
    schedule = style(task.serving.style)(task.serving, arch, task.rows)

    def generate(s: Schedule) -> list[Schedule]:
        copies = [(space, s.copy()) for space in schedule.spaces()]
        for space, copy in copies:
            space.apply(copy)
        return [copy for _, copy in copies]

    return generate


def tune(task: Task, arch: str, threads: int, trials: int, work: Path, gauge: Gauge, say: Show) -> Record:
    """Search what is left of ``trials`` (records of an earlier run count), then duel with the default."""
    mod = workload(task)
    database = open_database(work)
    with tempfile.TemporaryDirectory(prefix="tvm_moe-tune-") as folder:
        meter = Meter(task, arch, threads, Path(folder), gauge)
        if (left := trials - len(trials_of(database, mod))) > 0:
            search(mod, database, meter, left)
            if meter.failure:
                say(f"{task.label}: a trial failed: {meter.failure.strip().splitlines()[-1]}")
        return duel(task, without_defaults(task, best(database, mod, say), arch), meter)


@contextmanager
def without_foreign_intrinsics() -> Iterator[None]:
    """TuneContext imports the intrinsics of every target, half a minute for CUDA alone; ours register themselves."""
    name = "tvm.s_tir.tensor_intrin"
    absent = name not in sys.modules
    if absent:
        sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        if absent:
            del sys.modules[name]


def register_intrinsics() -> None:
    """A database reads the traces of all its records when it is opened; the intrinsics they name must exist by then."""
    for name in {kernel.intrinsic for kernel in TABLE if kernel.intrinsic}:
        intrin.family(name).tensor_intrin()


def open_database(folder: Path) -> Any:
    register_intrinsics()
    try:
        return ms.database.JSONDatabase(*(str(folder / name) for name in DATABASE))
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise MoEError(
            f"the database of earlier trials in {folder} is damaged ({reason}); delete the folder"
        ) from error


def search(mod: tvm.IRModule, database: Any, meter: Meter, trials: int) -> None:
    with without_foreign_intrinsics():
        context = tune_context(mod, meter)
    ms.tune_tasks(
        tasks=[context], task_weights=[1.0], work_dir=str(meter.folder), max_trials_global=trials,
        num_trials_per_iter=min(trials, 4), builder=Builder(meter), runner=Runner(meter), database=database,
        cost_model="random", measure_callbacks=[ms.measure_callback.AddToDatabase()], task_scheduler="round-robin",
    )  # fmt: skip


def tune_context(mod: tvm.IRModule, meter: Meter) -> Any:
    return ms.TuneContext(
        mod=mod, target=build.target(meter.task.kernel, meter.arch, **{"num-cores": meter.threads}), task_name="main",
        space_generator=ms.space_generator.ScheduleFn(
            spaces(meter.task, meter.arch), sch_rules=[], postprocs=[], mutator_probs={}
        ),
        search_strategy="replay-trace", num_threads=1, logger=LOGGER,
    ).clone()  # fmt: skip


def trials_of(database: Any, mod: tvm.IRModule) -> list[tuple[Decisions, Any]]:
    """What each recorded trial decided, and its record, fastest first."""
    found = database.get_top_k(database.commit_workload(mod), 1 << 20) if database.has_workload(mod) else ()
    made = []
    for record in found:
        s = Schedule(mod)
        record.trace.apply_to_schedule(s, remove_postproc=False)
        made.append((decisions_of(s.mod), record))
    return made


def best(database: Any, mod: tvm.IRModule, say: Show) -> Decisions:
    """Decisions with the least median of all their trials; the schedule's defaults where every trial failed."""
    times: dict[Decisions, list[float]] = {}
    for decisions, record in trials_of(database, mod):
        seconds = [float(s) for s in record.run_secs]
        if seconds and max(seconds) < FAILED_SECONDS:
            times.setdefault(decisions, []).extend(seconds)
    if not times:
        say("every trial of this task has failed; the defaults stay")
        return ()
    return min(times, key=lambda decisions: statistics.median(times[decisions]))


def duel(task: Task, found: Decisions, meter: Meter) -> Record:
    """Default against found, in turns; a record without decisions is one where the default won."""
    paths = [meter.build(decisions) for decisions in dict.fromkeys(((), found))]
    times = meter.costs(paths, DUEL_PASSES)
    default, tuned = (statistics.median(passes) * meter.gauge.scale for passes in (times[0], times[-1]))
    quartile, ratio, _ = statistics.quantiles((a / b for a, b in zip(times[0], times[-1], strict=True)), n=4)
    won = found if ratio >= WIN and quartile > 1 else ()
    return Record(task.kernel.name, task.stage, task.K, task.rows, won, default, tuned if won else default)


def prune(work: Path, folder: Path, arch: str, won: Iterable[tuple[Task, Record]]) -> None:
    """MetaSchedule's database with nothing but the fastest trial of the decisions that won, of each task that has some."""
    full = open_database(work)
    for name in DATABASE:
        (folder / name).unlink(missing_ok=True)
    small = open_database(folder)
    for task, kept in won:
        mod = workload(task)
        trials = (
            r for d, r in trials_of(full, mod) if kept.decisions and without_defaults(task, d, arch) == kept.decisions
        )
        for found in islice(trials, 1):
            entry = found.trace, small.commit_workload(mod), found.run_secs, found.target, found.args_info
            small.commit_tuning_record(ms.database.TuningRecord(*entry))
