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
from .trial import Builder, Clock, Meter, Runner, decisions_of

DUEL_PASSES = 15
WIN = 1.01  # a record must be this much faster than the default in turns with it, and faster in three turns of four
FAILED_SECONDS = 1e9  # MetaSchedule stores failed trials with 1e10
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
    defaults = {d.name: d.default for d in style(task.kernel.style)(task.kernel, arch, task.rows).decisions()}
    return tuple((name, value) for name, value in decisions if defaults[name] != value)


def workload(task: Task) -> tvm.IRModule:
    """The tile with fixed sizes. Stages with the same K are the same computation: a name tells their records apart."""
    func = compute.gemm_tile(task.kernel, task.rows, task.groups)
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main").with_attr("moe_task", task.label)})


def spaces(task: Task, arch: str) -> Callable[[Schedule], list[Schedule]]:
    """A design space for every combination of the structural decisions."""
    schedule = style(task.kernel.style)(task.kernel, arch, task.rows)

    def generate(s: Schedule) -> list[Schedule]:
        copies = [(space, s.copy()) for space in schedule.spaces()]
        for space, copy in copies:
            space.apply(copy)
        return [copy for _, copy in copies]

    return generate


def tune(task: Task, arch: str, threads: int, trials: int, work: Path, clock: Clock, say: Show) -> Record:
    """Search what is left of ``trials`` (records of an earlier run count), then duel with the default."""
    mod = workload(task)
    register_intrinsics()
    database = open_database(work)
    with tempfile.TemporaryDirectory(prefix="tvm_moe-tune-") as folder:
        meter = Meter(task, arch, threads, Path(folder), clock)
        if (left := trials - len(records(database, mod))) > 0:
            search(mod, database, meter, left)
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


def open_database(work: Path) -> Any:
    names = "database_workload.json", "database_tuning_record.json"
    try:
        return ms.database.JSONDatabase(*(str(work / name) for name in names))
    except (RuntimeError, ValueError) as error:
        raise MoEError(
            f"the database of earlier trials in {work} is damaged ({str(error).strip().splitlines()[-1]}); delete the folder"
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


def records(database: Any, mod: tvm.IRModule) -> list[Any]:
    return list(database.get_top_k(database.commit_workload(mod), 1 << 20)) if database.has_workload(mod) else []


def best(database: Any, mod: tvm.IRModule, say: Show) -> Decisions:
    """Decisions with the least median of all their trials; the schedule's defaults where every trial failed."""
    times: dict[Decisions, list[float]] = {}
    for found in records(database, mod):
        seconds = [float(s) for s in found.run_secs]
        if seconds and max(seconds) < FAILED_SECONDS:
            s = Schedule(mod)
            found.trace.apply_to_schedule(s, remove_postproc=False)
            times.setdefault(decisions_of(s.mod), []).extend(seconds)
    if not times:
        say("every trial failed; the defaults stay")
        return ()
    return min(times, key=lambda decisions: statistics.median(times[decisions]))


def duel(task: Task, found: Decisions, meter: Meter) -> Record:
    """Default against found, in turns; a record without decisions is one where the default won."""
    times = meter.seconds([meter.build(()), meter.build(found)], DUEL_PASSES)
    default, tuned = (statistics.median(passes) * 1e6 for passes in times)
    quartile, ratio, _ = statistics.quantiles((a / b for a, b in zip(*times, strict=True)), n=4)
    won = found if ratio >= WIN and quartile > 1 else ()
    return Record(task.kernel.name, task.stage, task.K, task.rows, won, default, tuned if won else default)


def prune(work: Path, folder: Path, kept: Iterable[Task]) -> None:
    """MetaSchedule's database with nothing but the best record of each task whose decisions won."""
    names = ("database_workload.json", "database_tuning_record.json")
    register_intrinsics()
    full = ms.database.JSONDatabase(*(str(work / name) for name in names))
    for name in names:
        (folder / name).unlink(missing_ok=True)
    small = ms.database.JSONDatabase(*(str(folder / name) for name in names))
    for task in kept:
        for found in full.get_top_k(full.commit_workload(workload(task)), 1):
            small.commit_tuning_record(
                ms.database.TuningRecord(
                    found.trace, small.commit_workload(workload(task)), found.run_secs, found.target, found.args_info
                )
            )
