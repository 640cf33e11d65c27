"""The whole benchmark: for each model start the sides, for each workload let them take turns, the machine's limits among
them, check outputs, and return everything as plain data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .. import isa, modules, threads
from ..errors import ModuleError
from ..models import LayerShape
from . import cells, checks, machine, peers
from .fleet import PROCESS_BYTES, Entry, Fleet, arrange, layer_bytes
from .layers import Source, layers_in_rotation
from .options import Options
from .probes import Probes
from .roofline import Limits
from .routing import Workload
from .timing import Spread, rounds

MEMORY_SHARE = 0.85  # of what is available; the rest is for inputs, scratch and everybody else
Say = Callable[[str], None]


class Run:
    """One run of the benchmark; `report` grows as it goes."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options, self.say = options, say
        if options.threads is not None:
            torch.set_num_threads(options.threads)
            threads.set_num_threads(options.threads)
        self.threads = threads.get_num_threads()
        self.sides = peers.chosen(options.peers)
        self.report = machine.header(options, self.threads)
        self.probes = self.open_probes()

    def open_probes(self) -> Probes | None:
        o = self.options
        self.say("looking for kernel modules, building them if they are missing")
        for dtype in o.dtypes:
            modules.find(isa.choose(dtype, o.isa).kernel)
        try:
            return Probes(o.dtypes, o.isa, self.report["machine"]["l3_bytes"], o.stream_bytes)
        except ModuleError as error:  # no compiler: times are right all the same
            self.report["notes"].append(f"no roofline: {error}")
            return None

    def whole(self) -> dict[str, Any]:
        for shape in self.options.shapes:
            self.model(shape)
        cells.compare_dtypes(self.report["cells"])
        self.report["load"]["after"] = machine.load()
        return self.report

    def model(self, shape: LayerShape) -> None:
        """All cells of one layer shape."""
        o, sizes = self.options, layer_bytes(shape, self.options.dtypes)
        l3 = self.report["machine"]["l3_bytes"]
        wanted = {dtype: layers_in_rotation(size, l3, o.rotation_bytes) for dtype, size in sizes.items()}
        groups, left_out = arrange(
            self.entries(shape), wanted, sizes, int(MEMORY_SHARE * machine.memory("MemAvailable")), PROCESS_BYTES
        )
        for entry in left_out:
            self.absent(shape, entry, f"a layer of {sizes[entry.dtype] / 2**30:.1f} GiB does not fit memory")
        for group in groups:
            layers = {dtype: min(group.most, n) for dtype, n in wanted.items()}
            with Fleet(self.say) as fleet:
                fleet.start(shape, group.entries, layers, self.threads, o.isa)
                workloads = [Workload(t, r) for r in o.routings for t in o.tokens]
                self.settle(workloads[0], fleet)
                for workload in workloads:
                    self.say(f"{shape.name}: {workload.tokens} tokens, {workload.routing}")
                    self.workload(shape, workload, fleet, layers)
            self.report["versions"] |= fleet.versions
            for entry, reason in fleet.failed.items():
                self.absent(shape, entry, reason)

    def entries(self, shape: LayerShape) -> list[Entry]:
        found = []
        for entry in (Entry(side, dtype) for dtype in self.options.dtypes for side in self.sides):
            usable, reason = entry.side.usable(shape, entry.dtype)
            if usable:
                found.append(entry)
            else:
                self.absent(shape, entry, reason)
        return found

    def absent(self, shape: LayerShape, entry: Entry, reason: str) -> None:
        row = {"model": shape.name, "side": entry.side.name, "dtype": entry.dtype, "reason": reason}
        self.report["absent"].append(row)

    def settle(self, workload: Workload, fleet: Fleet) -> None:
        """The first cell without its figures: in three runs of nine it was disturbed right after all layers were packed."""
        self.say("settling")
        fleet.prepare([workload])
        self.take_turns([(entry, workload) for entry in fleet.remotes], fleet)

    def workload(self, shape: LayerShape, workload: Workload, fleet: Fleet, layers: dict[str, int]) -> None:
        """All sides in turn under one workload; ours also without its skew."""
        both = [workload, workload.flat] if workload.skewed else [workload]
        fleet.prepare(both)
        turns = [(e, w) for e in fleet.remotes for w in (both if e.side is peers.OURS else both[:1])]
        times, limits = self.take_turns(turns, fleet) if turns else ({}, [])
        for dtype in self.options.dtypes:
            ended = {e: times[e, w] for e, w in times if e.dtype == dtype and w is workload}
            if ended:
                calls = len(next(iter(ended.values())))
                made = self.cell(shape, workload, dtype, ended, calls, fleet, limits)
                flat = times.get((Entry(peers.OURS, dtype), workload.flat))
                if flat and (ours := cells.our_ms(made)):
                    made["skew_cost"] = ours / 1e3 / Spread.of(flat).median
                self.report["cells"].append(made | {"layers": layers[dtype], "load": machine.load()})

    def take_turns(
        self, turns: list[tuple[Entry, Workload]], fleet: Fleet
    ) -> tuple[dict[tuple[Entry, Workload], list[float]], list[Limits]]:
        """Seconds of every call, and what the machine allowed in each round: the probes take turns as the sides do."""
        limits: list[Limits] = []

        def call(turn: tuple[Entry, Workload] | None, i: int) -> float | None:
            if turn is not None:
                return fleet.call(turn, i)
            start = time.perf_counter()
            assert self.probes is not None
            limits.append(self.probes.measure(self.threads))
            return time.perf_counter() - start

        everyone = [None, *turns] if self.probes else turns
        times = rounds(everyone, call, self.options.budget, self.options.fewest_rounds)
        counted = len(times.get(None, ()))
        return {turn: seconds for turn, seconds in times.items() if turn}, limits[len(limits) - counted :]

    def cell(
        self, shape: LayerShape, workload: Workload, dtype: str, times: dict[Entry, list[float]], calls: int,
        fleet: Fleet, limits: list[Limits],
    ) -> dict[str, Any]:  # fmt: skip
        source = Source(shape, dtype)
        expected = checks.expected(source, workload, calls)
        results = []
        for entry, seconds in times.items():
            adapter, got = entry.side.load(), fleet.rows(entry, workload, checks.sampled_tokens(workload.tokens))
            check = None if got is None else expected.check(got, adapter.noise_factor, adapter.roundings)
            results.append(cells.Result(entry.side.name, seconds, check))
        touched = checks.touched_experts(source, workload, calls)
        return cells.cell(shape, workload, dtype, touched, results, limits)


def run(options: Options, say: Say = lambda _: None) -> dict[str, Any]:
    return Run(options, say).whole()


def passed(report: dict[str, Any]) -> bool:
    """Whether every output of ours was right; a peer that is wrong is marked, and left out of the ratios."""
    ours = [s for c in report["cells"] for s in c["sides"] if s["side"] == peers.OURS.name]
    missing = any(a["side"] == peers.OURS.name for a in report["absent"])
    return not missing and all(s["check"] and s["check"]["passed"] for s in ours)
