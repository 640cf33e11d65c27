"""Outer product with broadcast activations: every row's K group meets all NR columns of the panel (x86, Arm dot product).

Registers: rows * NR/lanes accumulators, NR/lanes weight vectors, one broadcast.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from tvm_moe.compiler import intrin

from .skeleton import Decision, TileSchedule


class OuterProduct(TileSchedule):
    PREFETCH_ROWS = 4

    def decisions(self) -> tuple[Decision, ...]:
        # Two lines per K group: two tiles then ask for the whole next chunk (NR * group = 256 bytes a group) in about the
        # time memory needs to bring it; four lines in one tile were no faster. Tiles of few rows wait for memory anyway.
        lines = 2 if self.rows >= self.PREFETCH_ROWS else 0
        return (
            Decision("prefetch", (0, 1, 2, 4), lines),
            Decision("vectors_outside", (0, 1), 0, structural=True),  # of rows: then a weight vector is loaded once
        )

    def tile_loops(self, s: Schedule, acc: Any, decided: dict[str, Any]) -> tuple[Any, Any]:
        r, n, k = s.get_loops(acc)
        vector, lane = s.split(n, [None, self.lanes])
        k_outer, k_inner = s.split(k, [None, self.kernel.group])
        inside = (vector, r) if decided["vectors_outside"] else (r, vector)
        s.reorder(k_outer, *inside, lane, k_inner)
        if self.kernel.intrinsic is None:  # before the reduction is decomposed: afterwards TVM no longer allows it
            s.reorder(k_inner, lane)
            s.unroll(k_inner)
            s.vectorize(lane)
        for loop in (r, vector):
            s.unroll(loop)
        return k_outer, lane

    def instruction(self, s: Schedule, lane: Any) -> None:
        if self.kernel.intrinsic is not None:
            s.tensorize(lane, intrin.family(self.kernel.intrinsic).tensor_intrin())
