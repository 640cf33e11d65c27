"""The work of a call as the compiled driver does it: the items of a real plan in ticket order, with what they wait for.

It says again what compiler/driver/{tiles,worker} say in TVMScript; a test compares it with what a module leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .. import plan
from ..kernels import MicroKernel
from ..plan import PREPARE_ROWS, Plan
from .costs import Costs

F = plan.Field
Flag = tuple[str, int]  # ("prepared", 0), ("ready", block), ("down", group), ("combined", group): the driver's counters


@dataclass(frozen=True)
class Item:
    stage: str  # "prepare", "gate/up", "down", "combine"; "none": a ticket without work
    seconds: float
    waits: tuple[Flag, ...]
    joins: Flag  # which is reached when the last item that joins it has ended


@dataclass(frozen=True)
class Work:
    """``last``: seconds that whoever ends the last item of a flag works on before the flag is reached."""

    items: list[Item]  # a ticket's number is its index
    last: dict[Flag, float]

    @property
    def seconds(self) -> float:
        return sum(item.seconds for item in self.items) + sum(self.last.values())


def blocks(ids: Tensor, experts: int, row_block: int) -> list[int]:
    """Rows of each block: those of an expert in as few equal parts as ``row_block`` allows."""
    made = []
    for n in ids.flatten().bincount(minlength=experts).tolist():
        made += parts(n, -(-n // row_block))
    return made or [0]


def of(kernel: MicroKernel, p: Plan, rows: list[int], costs: Costs) -> Work:
    """All that a call does in its parallel region; ``rows`` of each block."""
    items = [*prepare(kernel, p, costs), *gate_up(kernel, p, rows, costs), *down(kernel, p, rows, costs)]
    quantized = 5 if kernel.dtype == "int8" else 0  # bytes a value of the intermediate: f32 read, int8 written
    last = {("ready", b): costs.rows(quantized * n * p[F.H_LD]) for b, n in enumerate(rows)}
    return Work(items, last)


def prepare(kernel: MicroKernel, p: Plan, costs: Costs) -> Iterator[Item]:
    row_bytes = 2 * p[F.HIDDEN] + kernel.activation_size * p[F.X_LD]
    for n in portions(p[F.X_ROWS], PREPARE_ROWS):
        yield Item("prepare", costs.item * 1e-6 + costs.rows(n * row_bytes), (), ("prepared", 0))


def gate_up(kernel: MicroKernel, p: Plan, rows: list[int], costs: Costs) -> Iterator[Item]:
    """Block by block. The ring: a block's intermediate takes the place of one that must be complete."""
    for b, n in enumerate(rows):
        ring = [("ready", b - p[F.RING_H])] if b >= p[F.RING_H] else []
        for panels in portions(p[F.PANELS13], p[F.GROUP13]):
            yield Item("gate/up", costs.gemm(kernel, n, panels, p[F.K13]), (("prepared", 0), *ring), ("ready", b))


def down(kernel: MicroKernel, p: Plan, rows: list[int], costs: Costs) -> Iterator[Item]:
    """Rounds: a panel group's blocks, and the combine of the group ``lag`` rounds before.

    The ring: a group's results take the place of some that must be combined.
    """
    groups, none = groups2(p), Item("none", 0.0, (), ("none", 0))
    lag = min(p[F.RING_Y] - 1, -(-2 * p[F.THREADS] // len(rows)))
    slot_bytes = kernel.NR * (4 * p[F.TOP_K] + 2)  # of a panel and token: f32 of all slots read, bf16 written
    for j in range(len(groups) + lag):
        ring = [("combined", j - p[F.RING_Y])] if j >= p[F.RING_Y] else []
        for b, n in enumerate(rows):
            yield (
                none
                if j >= len(groups)
                else Item("down", costs.gemm(kernel, n, groups[j], p[F.K2]), (("ready", b), *ring), ("down", j))
            )
        for tokens in parts(p[F.TOKENS], p[F.COMBINE_PARTS]):
            g = j - lag
            yield (
                none
                if g < 0
                else Item(
                    "combine",
                    costs.item * 1e-6 + costs.rows(groups[g] * tokens * slot_bytes),
                    (("down", g),),
                    ("combined", g),
                )
            )


def parts(count: int, n: int) -> list[int]:
    """``count`` in ``n`` equal parts."""
    return [count * (i + 1) // n - count * i // n for i in range(n)]


def groups2(p: Plan) -> list[int]:
    return portions(p[F.PANELS2], p[F.GROUP2])


def portions(count: int, most: int) -> list[int]:
    """``count`` in portions of ``most``, and what is left."""
    return [min(most, count - start) for start in range(0, count, most)]
