"""The skeleton every tile GEMM schedule shares: its steps in order, its sampled decisions and their defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm.s_tir import Schedule

from tvm_moe.compiler import intrin
from tvm_moe.errors import MoEError
from tvm_moe.kernels import MicroKernel

DECISION = "moe_decision."  # annotations of the K loop: what was decided, for compiler/module and for the tuner


@dataclass(frozen=True)
class Decision:
    """One thing that may be chosen: its candidates, and the one used without tuning.

    ``structural``: other candidates are other loops, a design space of their own for MetaSchedule; else it is sampled.
    """

    name: str
    candidates: tuple[int, ...]
    default: int
    structural: bool = False


class TileSchedule(ABC):
    """``apply`` = sample -> loops -> start the sum -> instruction -> epilogue; subclasses fill in the ISA's part.

    ``chosen``: decisions that a tune log has made, by name.
    """

    SCOPE = "local"  # where the sums are

    def __init__(self, kernel: MicroKernel, arch: str, rows: int, chosen: Mapping[str, int] | None = None) -> None:
        self.kernel, self.arch, self.rows = kernel, arch, rows
        self.chosen = dict(chosen or {})
        for name, value in self.chosen.items():
            known = {d.name: d.candidates for d in self.decisions()}
            if value not in known.get(name, ()):
                raise MoEError(
                    f"decision {name}={value} of {type(self).__name__} is not one of {known}; the tune log is of another "
                    f"version: tune again"
                )

    @property
    def lanes(self) -> int:
        """Columns of one instruction; without one, what LLVM cuts into registers."""
        return intrin.family(self.kernel.intrinsic).LANES if self.kernel.intrinsic else 16

    @abstractmethod
    def decisions(self) -> tuple[Decision, ...]:
        """What may be chosen for this tile."""

    def spaces(self) -> Iterator[TileSchedule]:
        """This schedule with each combination of the structural decisions."""
        structural = [d for d in self.decisions() if d.structural]
        for values in product(*(d.candidates for d in structural)):
            fixed = {d.name: value for d, value in zip(structural, values, strict=True)}
            yield type(self)(self.kernel, self.arch, self.rows, fixed)

    def apply(self, s: Schedule) -> None:
        decided = {d.name: self.decide(s, d) for d in self.decisions()}
        acc = s.get_sblock("acc")
        s.set_scope(acc, 0, self.SCOPE)
        k_outer, lane = self.tile_loops(s, acc, decided)
        for name, value in decided.items():
            s.annotate(k_outer, DECISION + name, value)
        start = s.decompose_reduction(acc, k_outer)
        self.instruction(s, lane)
        self.vectorize_start(s, start)
        self.vectorize_rows(s, s.get_sblock("out"))

    def decide(self, s: Schedule, d: Decision) -> Any:
        """An integer for a structural decision, a sampled variable for the others."""
        value = self.chosen.get(d.name, d.default)
        if d.structural:
            return value
        n = len(d.candidates)
        return s.sample_categorical(list(d.candidates), [1.0 / n] * n, decision=d.candidates.index(value))

    @abstractmethod
    def tile_loops(self, s: Schedule, acc: Any, decided: dict[str, Any]) -> tuple[Any, Any]:
        """Order the loops of the sum; returns (the loop it starts before, the loop that becomes one instruction)."""

    @abstractmethod
    def instruction(self, s: Schedule, lane: Any) -> None:
        """Put the matrix instruction in place of the innermost loops."""

    def vectorize_start(self, s: Schedule, block: Any) -> None:
        self.vectorize_rows(s, block)

    def vectorize_rows(self, s: Schedule, block: Any) -> None:
        """Rows and vectors unrolled: all accumulators have names, so LLVM keeps them in registers."""
        *_, row, column = s.get_loops(block)
        outer, vector = s.split(column, [None, self.lanes])
        s.vectorize(vector)
        s.unroll(outer)
        s.unroll(row)
