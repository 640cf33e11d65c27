"""The sides that take turns: which fit memory together, their processes, what became of those that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ..models import LayerShape
from .layers import Source
from .peers import Side
from .remote import Remote, SideFailedError
from .routing import Workload
from .worker import Job

PROCESS_BYTES = 700 << 20  # torch, the inputs of all calls, scratch; seven sides without it were ended by the system


@dataclass(frozen=True)
class Entry:
    """A side that runs layers of one dtype."""

    side: Side
    dtype: str


@dataclass(frozen=True)
class Group:
    """Entries that run at the same time, with at most ``most`` layers each in rotation."""

    entries: tuple[Entry, ...]
    most: int


def arrange(
    entries: Sequence[Entry],
    wanted: dict[str, int],
    layer_bytes: dict[str, int],
    available: int,
    process_bytes: int = 0,
) -> tuple[list[Group], list[Entry]]:
    """Groups that fit ``available`` bytes, and the entries that fit none.

    All together where possible, else dtype by dtype, else with fewer layers, else without the last ones. ``wanted``:
    layers of each dtype; ``layer_bytes``: their size, needed once more while a side converts what it was given;
    ``process_bytes``: what a side's process needs beyond its layers.
    """

    def fits(group: Sequence[Entry], most: int) -> bool:
        sizes = [layer_bytes[e.dtype] * min(most, wanted[e.dtype]) for e in group]
        return (
            len(group) * process_bytes + sum(sizes) + max((layer_bytes[e.dtype] for e in group), default=0) <= available
        )

    most = max(wanted.values())
    if fits(entries, most):
        return [Group(tuple(entries), most)], []
    groups, left_out = [], []
    for dtype in wanted:
        group = [e for e in entries if e.dtype == dtype]
        while group and not fits(group, 1):
            left_out.append(group.pop())
        if group:
            groups.append(Group(tuple(group), max(n for n in range(1, most + 1) if fits(group, n))))
    return groups, left_out


class Fleet:
    """The processes of a group's sides, and why some of them are not there or have left."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.remotes: dict[Entry, Remote] = {}
        self.failed: dict[Entry, str] = {}
        self.versions: dict[str, str | None] = {}
        self.say = say

    def start(
        self, shape: LayerShape, entries: Iterable[Entry], layers: dict[str, int], threads: int, isa: str | None
    ) -> None:
        for entry in entries:
            self.say(f"{shape.name}: building {layers[entry.dtype]} {entry.dtype} layers for {entry.side.name}")
            try:
                job = Job(entry.side.name, shape, entry.dtype, layers[entry.dtype], threads, isa)
                remote = self.remotes[entry] = Remote(job)
                self.versions[entry.side.name] = remote.version
            except SideFailedError as error:
                self.failed[entry] = str(error)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for remote in self.remotes.values():
            remote.close()

    def prepare(self, workloads: Iterable[Workload]) -> None:
        for entry in list(self.remotes):
            self.attempt(entry, "forget")
            for workload in workloads:
                self.attempt(entry, "prepare", workload)

    def call(self, turn: tuple[Entry, Workload], i: int) -> float | None:
        entry, workload = turn
        return self.attempt(entry, "call", workload, i)

    def rows(self, entry: Entry, workload: Workload, tokens: list[int]) -> torch.Tensor | None:
        got = self.attempt(entry, "rows", workload, tokens)
        return None if got is None else torch.from_numpy(got)

    def attempt(self, entry: Entry, method: str, *arguments: Any) -> Any:
        """The answer, or None from a side that has failed, now or before."""
        if entry not in self.remotes:
            return None
        try:
            return self.remotes[entry].ask(method, *arguments)
        except SideFailedError as error:
            self.failed[entry] = str(error)
            self.remotes.pop(entry).close()
            return None


def layer_bytes(shape: LayerShape, dtypes: Iterable[str]) -> dict[str, int]:
    return {dtype: Source(shape, dtype).nbytes for dtype in dtypes}
