"""The skeleton every tile GEMM schedule shares: its steps in order, its sampled decisions and their defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from tvm.s_tir import Schedule

from tvm_moe.kernels import MicroKernel

PREFETCH = (
    "moe_prefetch"  # annotation of the K loop: cache lines to prefetch per K group (compiler/module inserts them)
)


@dataclass(frozen=True)
class Decision:
    """One thing MetaSchedule may choose: its candidates, and the index of the one used without tuning."""

    name: str
    candidates: tuple[int, ...]
    default: int


class TileSchedule(ABC):
    """``apply`` = sample -> loops -> start the sum -> instruction -> epilogue; subclasses fill in the ISA's part."""

    decisions: ClassVar[tuple[Decision, ...]] = ()

    def __init__(self, kernel: MicroKernel, arch: str, rows: int) -> None:
        self.kernel, self.arch, self.rows = kernel, arch, rows

    def apply(self, s: Schedule) -> None:
        chosen = {d.name: self.sample(s, d) for d in self.decisions}
        acc = s.get_sblock("acc")
        s.set_scope(acc, 0, "local")
        k_outer, lane = self.tile_loops(s, acc, chosen)
        start = s.decompose_reduction(acc, k_outer)
        self.instruction(s, lane)
        for block in (start, s.get_sblock("out")):
            self.vectorize_rows(s, block)

    @staticmethod
    def sample(s: Schedule, decision: Decision) -> Any:
        n = len(decision.candidates)
        return s.sample_categorical(list(decision.candidates), [1.0 / n] * n, decision=decision.default)

    @abstractmethod
    def tile_loops(self, s: Schedule, acc: Any, chosen: dict[str, Any]) -> tuple[Any, Any]:
        """Order the loops of the sum; returns (the loop it starts before, the loop that becomes one instruction)."""

    @abstractmethod
    def instruction(self, s: Schedule, lane: Any) -> None:
        """Put the matrix instruction in place of the innermost loops."""

    @staticmethod
    def vectorize_rows(s: Schedule, block: Any, lanes: int = 16) -> None:
        """Rows and vectors unrolled: all accumulators have names, so LLVM keeps them in registers."""
        *_, row, column = s.get_loops(block)
        outer, vector = s.split(column, [None, lanes])
        s.vectorize(vector)
        s.unroll(outer)
        s.unroll(row)
