"""Outer product with broadcast activations: every row's K group meets all NR columns of the panel (x86, Arm dot product).

Registers: rows * NR/lanes accumulators, NR/lanes weight vectors, one broadcast. Where the accumulators alone would not fit,
the tile passes half of the panel's columns, then the other half: twice the rows share the work on a weight vector.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from tvm_moe.compiler import intrin

from .skeleton import Decision, TileSchedule


class OuterProduct(TileSchedule):
    PREFETCH_ROWS = 4

    def decisions(self) -> tuple[Decision, ...]:
        # The tiles of a block share the next chunk, NR * group = 256 bytes a K group: two ask for 128 each, three for 85.
        # With six lines they ask for all of it two or three times, which is 2 to 5 % faster at two or three tiles than asking
        # once (the CPU drops some), and no slower at more. One line would leave gaps, which is 1.15 times slower
        # than none: the hardware's own prefetcher loses the stream. Tiles of few rows wait for memory anyway.
        group_bytes = self.kernel.NR * self.kernel.group * self.kernel.weight_size
        least = 2 if self.kernel.lone_ahead else self.PREFETCH_ROWS
        lines = 2 * -(-3 * group_bytes // 256) if self.rows >= least else 0
        return (
            Decision("prefetch", (0, 2, 4, 6), lines),
            # Vectors outside of rows: a weight vector is loaded once, and only one is held at a time.
            Decision("vectors_outside", (0, 1), int(self.registers_needed > self.kernel.registers), structural=True),
        )

    @property
    def vectors(self) -> int:
        """Registers that the sums of a row take."""
        family = intrin.family(self.kernel.intrinsic) if self.kernel.intrinsic else None
        return self.kernel.NR // self.lanes * getattr(family, "REGISTERS", 1)

    @property
    def registers_needed(self) -> int:
        """With rows outside: the sums, all weight vectors (loaded once, for all rows), a broadcast."""
        held = getattr(intrin.family(self.kernel.intrinsic), "HELD", 1) if self.kernel.intrinsic else 1
        return self.rows * self.vectors + (self.vectors + 1) * held

    @property
    def halved(self) -> bool:
        """Whether the sums leave no room for two weight vectors, a broadcast and a product."""
        return self.rows * self.vectors + 4 > self.kernel.registers

    def tile_loops(self, s: Schedule, acc: Any, decided: dict[str, Any]) -> tuple[Any, Any]:
        if self.halved:
            row, column = s.get_loops(s.get_sblock("out"))
            half, column = s.split(column, [2, None])
            s.reorder(half, row, column)
            s.compute_at(acc, half)
        *_, r, n, k = s.get_loops(acc)
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
