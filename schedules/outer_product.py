"""Outer product with broadcast activations: every row's K group meets all NR columns of the panel (x86, Arm dot product).

Registers: rows * NR/16 accumulators, NR/16 weight vectors, one broadcast.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from tvm_moe.compiler import intrin

from .skeleton import PREFETCH, Decision, TileSchedule


class OuterProduct(TileSchedule):
    # Two lines per K group: two tiles then ask for the whole next chunk (NR * group = 256 bytes a group) in about the time
    # memory needs to bring it; four lines in one tile were no faster, and tiles of few rows wait for memory anyway.
    decisions = (Decision("prefetch", (0, 1, 2, 4), 2),)
    PREFETCH_ROWS = 4
    LANES = 16

    def tile_loops(self, s: Schedule, acc: Any, chosen: dict[str, Any]) -> tuple[Any, Any]:
        r, n, k = s.get_loops(acc)
        vector, lane = s.split(n, [None, self.LANES])
        k_outer, k_inner = s.split(k, [None, self.kernel.group])
        s.reorder(k_outer, r, vector, lane, k_inner)
        if self.kernel.intrinsic is None:  # before the reduction is decomposed: afterwards TVM no longer allows it
            s.reorder(k_inner, lane)
            s.unroll(k_inner)
            s.vectorize(lane)
        for loop in (r, vector):
            s.unroll(loop)
        s.annotate(k_outer, PREFETCH, chosen["prefetch"] if self.rows >= self.PREFETCH_ROWS else 0)
        return k_outer, lane

    def instruction(self, s: Schedule, lane: Any) -> None:
        if self.kernel.intrinsic is not None:
            s.tensorize(lane, intrin.family(self.kernel.intrinsic).tensor_intrin())
