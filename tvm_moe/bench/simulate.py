"""The driver's schedule on any number of threads, simulated: the items of a real plan (`work`), handed out to threads as
compiler/driver/worker does. Nothing is executed and nothing is timed; what items cost is a model (`costs`).

The figure is makespan / ideal, with ideal = all work / threads: 1 says that no thread ever waits. Only the parallel region
is looked at, neither the sorting of slots before it nor how long a team takes to begin and to end.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from .. import isa, plan
from ..activations import resolve
from ..kernels import MicroKernel
from ..models import LayerShape
from ..plan import LayerSizes
from . import machine, work
from .costs import Costs
from .options import Options
from .routing import Workload
from .work import Flag, Work

GOAL = 1.05
# Whose thread waits for which flag -> what that is called. "end": no tickets are left.
LOSSES = {
    ("gate/up", "prepared"): "prepare",
    ("gate/up", "ready"): "ring_h",
    ("down", "ready"): "intermediate",
    ("down", "combined"): "ring_y",
    ("combine", "down"): "down",
}


class Simulation:
    """Threads take tickets in order, each the one after its item in advance, until none are left."""

    def __init__(self, work: Work, threads: int) -> None:
        self.work = work
        self.tickets = iter(range(len(work.items)))
        self.left = Counter(item.joins for item in work.items)
        self.reached: set[Flag] = set()
        self.waiting: dict[Flag, list[Iterator[float | Flag]]] = defaultdict(list)
        self.begun: dict[int, float] = {}  # ticket -> when, all waits over
        self.ended: dict[int, float] = {}
        self.lost: dict[str, float] = defaultdict(float)  # thread seconds
        self.now, self.made, self.events = 0.0, 0, list[tuple[float, int, Iterator[float | Flag]]]()
        for _ in range(threads):
            self.resume(self.thread(), 0.0)
        self.run()
        self.ratio = self.now / (work.seconds / threads)
        self.lost["end"] = threads * self.now - work.seconds - sum(self.lost.values())

    @property
    def makespan(self) -> float:
        return self.now

    def thread(self) -> Iterator[float | Flag]:
        """What one thread does: yields seconds it works, or a flag it waits for."""
        following = next(self.tickets, None)
        while following is not None:
            ticket, following = following, next(self.tickets, None)
            item = self.work.items[ticket]
            for flag in item.waits:
                arrived = self.now
                yield flag
                self.lost[LOSSES[item.stage, flag[0]]] += self.now - arrived
            self.begun[ticket] = self.now
            yield item.seconds
            self.ended[ticket] = self.now
            self.left[item.joins] -= 1
            if not self.left[item.joins]:
                yield self.work.last.get(item.joins, 0.0)
                self.reach(item.joins)

    def reach(self, flag: Flag) -> None:
        self.reached.add(flag)
        for thread in self.waiting.pop(flag, ()):
            self.resume(thread, self.now)

    def resume(self, thread: Iterator[float | Flag], when: float) -> None:
        self.made += 1  # of events at the same time, the one made first comes first
        heapq.heappush(self.events, (when, self.made, thread))

    def run(self) -> None:
        while self.events:
            self.now, _, thread = heapq.heappop(self.events)
            step = next(thread, None)
            if isinstance(step, tuple) and step not in self.reached:
                self.waiting[step].append(thread)
            elif step is not None:
                self.resume(thread, self.now + (0.0 if isinstance(step, tuple) else step))


def sizes_of(shape: LayerShape) -> LayerSizes:
    gated = resolve(shape.activation, None, None).gated
    return LayerSizes(shape.E, shape.H, shape.I, gated, shape.bias, shape.bias)


def row(kernel: MicroKernel, shape: LayerShape, workload: Workload, threads: int, costs: Costs) -> dict[str, Any]:
    """One cell of the result; ``lost``: shares of all threads' time."""
    ids, F = workload.draw(shape, 1)[1], plan.Field
    done, blocks = [], 0
    for begin, end in plan.parts(kernel, sizes_of(shape), workload.tokens, shape.k, threads):
        p = plan.make(kernel, sizes_of(shape), end - begin, shape.k, threads, shape.H, shape.H)
        rows = work.blocks(ids[begin:end], shape.E, p[F.ROW_BLOCK])
        done.append(Simulation(work.of(kernel, p, rows, costs), threads))
        blocks += len(rows)
    ideal, makespan = sum(s.work.seconds for s in done) / threads, sum(s.makespan for s in done)
    names = {name for s in done for name in s.lost}
    return {
        "model": shape.name, "tokens": workload.tokens, "routing": workload.routing, "dtype": kernel.dtype,
        "threads": threads, "blocks": blocks, "items": sum(len(s.work.items) for s in done),
        "ideal_ms": ideal * 1e3, "makespan_ms": makespan * 1e3, "ratio": makespan / ideal,
        "lost": {n: sum(s.lost.get(n, 0.0) for s in done) / (threads * makespan) for n in sorted(names)},
    }  # fmt: skip


def run(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    kernels = {dtype: isa.choose(dtype, options.isa).kernel for dtype in options.dtypes}
    made: list[dict[str, Any]] = []
    for shape in options.shapes:
        say(f"{shape.name}: simulating")
        made += [
            row(kernel, shape, Workload(tokens, routing), threads, options.costs)
            for tokens in options.tokens
            for threads in options.simulate_threads
            for routing in options.routings
            for kernel in kernels.values()
        ]
    named = {dtype: kernel.name for dtype, kernel in kernels.items()}
    return machine.stamp() | {
        "kernels": named, "costs": vars(options.costs), "simulation": made, "cells": [], "absent": [],
    }  # fmt: skip
