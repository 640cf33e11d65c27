"""A trial of MetaSchedule: built by our own pipeline, timed in a process of its own."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from tvm_moe.schedules.skeleton import DECISION

from ..emulation.counting import Guest
from ..errors import EmulationError
from ..tuning import Decisions
from . import build, stage, stage_worker
from .stage import Task

PASSES = 5
COUNTED_CALLS, COUNTED_PANELS = (
    3,
    16,
)  # so many panels that the call itself, thousands of instructions, is a few percent
TIMEOUT_SECONDS = 60


def decisions_of(mod: tvm.IRModule) -> Decisions:
    """What a scheduled tile was given, read from the annotations of its K loop."""
    found: dict[str, int] = {}

    def visit(loop: tirx.For) -> None:
        names = (name for name in loop.annotations if name.startswith(DECISION))
        found.update({name.removeprefix(DECISION): int(loop.annotations[name]) for name in names})

    tvm_ffi.structural_walk(mod["main"].body, (tirx.For, visit))
    return tuple(sorted(found.items()))


class Gauge(Protocol):
    """Tells what modules of a task cost, on hardware (`Clock`) or by counting (`Counter`)."""

    unit: str
    scale: float  # of a cost to the unit
    measured: str  # what the manifest says of it

    def costs(self, paths: list[Path], task: Task, threads: int, passes: int) -> list[list[float]]:
        """Of each module, ``passes`` figures."""

    def close(self) -> None: ...


class Clock:
    """Seconds, in a worker process; a new one after a crash or a hang."""

    unit, scale = "us", 1e6
    measured = "hardware: median of passes over 256 MB of panels, default and tuned in turns"

    def __init__(self) -> None:
        self.pool: ProcessPoolExecutor | None = None

    def costs(self, paths: list[Path], task: Task, threads: int, passes: int) -> list[list[float]]:
        self.pool = self.pool or ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=stage_worker.end_with_parent
        )
        job = self.pool.submit(stage_worker.seconds, [str(p) for p in paths], task, threads, passes)
        try:
            return job.result(timeout=TIMEOUT_SECONDS)
        except (BrokenProcessPool, TimeoutError):
            self.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            for process in list((self.pool._processes or {}).values()):
                process.kill()
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None


class Counter:
    """Executed instructions under emulation, of AArch64 modules."""

    unit, scale = "instructions", 1.0
    measured = (
        "executed instructions of a pass over 16 panels under qemu-user: tuned by instruction count, not on hardware"
    )

    def __init__(self) -> None:
        build.linker("aarch64")  # what is missing is said before the first trial
        self.guest: Guest | None = Guest()

    def costs(self, paths: list[Path], task: Task, threads: int, passes: int) -> list[list[float]]:
        """The least of a few calls of each, ``passes`` times: the interpreter's own instructions vary by hundreds."""
        job = {"paths": list(map(str, paths)), "bytes_of": task.bytes_of(COUNTED_PANELS), "panels": COUNTED_PANELS}
        self.guest = self.guest or Guest()
        try:
            found = self.guest.regions("stages", calls=COUNTED_CALLS, **job)
        except EmulationError:
            self.guest = None  # it has closed itself
            raise
        least = [min(executed["all"] for number, executed in found if number == i + 1) for i in range(len(paths))]
        return [[float(count)] * passes for count in least]

    def close(self) -> None:
        if self.guest is not None:
            self.guest.close()


class Meter:
    """Builds and measures modules of one task."""

    def __init__(self, task: Task, arch: str, threads: int, folder: Path, gauge: Gauge) -> None:
        self.task, self.arch, self.threads, self.folder, self.gauge = task, arch, threads, folder, gauge
        self.built: dict[Decisions, Path] = {}
        self.failure = ""  # of the last trial that failed

    def build(self, decisions: Decisions) -> Path:
        if decisions not in self.built:
            path = self.folder / f"stage-{len(self.built)}.so"
            build.export(self.task.kernel, self.arch, path, lambda _, arch: stage.build_ir(self.task, arch, decisions))
            self.built[decisions] = path
        return self.built[decisions]

    def failed(self, error: Exception) -> str:
        """Note that a trial has failed, and why."""
        self.failure = f"{type(error).__name__}: {error}"
        return self.failure

    def costs(self, paths: list[Path], passes: int) -> list[list[float]]:
        return self.gauge.costs(paths, self.task, self.threads, passes)


@derived_object
class Builder(ms.builder.PyBuilder):
    """The stage's module around the scheduled tile, by our own pipeline."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def build(self, build_inputs: list[Any]) -> list[Any]:
        return [self.one(job.mod) for job in build_inputs]

    def one(self, mod: tvm.IRModule) -> Any:
        try:
            return ms.builder.BuilderResult(str(self.meter.build(decisions_of(mod))), None)
        except Exception as error:  # a trial that cannot be built is a failed trial, not the end
            return ms.builder.BuilderResult(None, self.meter.failed(error))


@derived_object
class Done(ms.runner.PyRunnerFuture):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.value = result

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.value


@derived_object
class Runner(ms.runner.PyRunner):
    """Measures one module at a time."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        return [Done(self.one(Path(job.artifact_path))) for job in runner_inputs]

    def one(self, path: Path) -> Any:
        try:
            return ms.runner.RunnerResult(self.meter.costs([path], PASSES)[0], None)
        except Exception as error:
            return ms.runner.RunnerResult(None, self.meter.failed(error))
