"""Outer product with broadcast activations: every row's K group meets all NR columns of the panel (x86, Arm dot product).

Registers: rows * NR/16 accumulators, NR/16 weight vectors, one broadcast.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from tvm_moe.compiler import intrin

from .skeleton import Decision, TileSchedule


class OuterProduct(TileSchedule):
    # k_unroll 1: the register tile hides the latency already, and LLVM unrolls short bodies itself.
    decisions = (Decision("k_unroll", (1, 2, 4), 0),)
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
        return k_outer, lane

    def instruction(self, s: Schedule, lane: Any) -> None:
        if self.kernel.intrinsic is not None:
            s.tensorize(lane, intrin.family(self.kernel.intrinsic).tensor_intrin())
