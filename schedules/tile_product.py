"""Products of tiles: 16 or 32 rows times 64 or 32 columns a K step, all sums in four tile registers (AMX).

The panel is passed in blocks of as many columns as those sums are for. A block of 32 rows takes two passes over a chunk of
it, which lies in L2 by then.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from tvm_moe.compiler import intrin
from tvm_moe.compiler.intrin import tiles

from .skeleton import Decision, TileSchedule


class TileProduct(TileSchedule):
    SCOPE = tiles.SCOPE

    def decisions(self) -> tuple[Decision, ...]:
        # By reasoning, not measured on a CPU that has the instruction. A step's four products, 16 cycles each, hide the 52
        # that the first one takes to finish. The step's 64 lines take 32 of the 64 cycles at two loads a cycle. Prefetches of
        # what comes next are left to tuning: whether they beat the hardware's prefetcher, which sees the panel line after
        # line while the first tile of a block passes and nothing then, takes a measurement. Eight steps at a time leave one
        # instruction of loop to 16 of tiles; more would leave longer rests (of 12 steps, K 768 in INT8).
        return (Decision("prefetch", (0, 4, 8, 16), 0), Decision("unroll", (1, 2, 4, 8), 8))

    @property
    def name(self) -> str:
        assert self.kernel.intrinsic is not None
        return intrin.family(self.kernel.intrinsic).tensor_intrin() + f"_{self.rows}"

    def tile_loops(self, s: Schedule, acc: Any, decided: dict[str, Any]) -> tuple[Any, Any]:
        running, out = s.get_sblock("running"), s.get_sblock("out")
        s.set_scope(running, 0, self.SCOPE)
        if tiles.columns(self.rows) < self.kernel.NR:
            row, column = s.get_loops(out)
            block, column = s.split(column, [None, tiles.columns(self.rows)])
            s.reorder(block, row, column)
            s.compute_at(acc, block)
            s.compute_at(running, block, index=0)
        *_, row, column, k = s.get_loops(acc)
        steps, k = s.split(k, [None, self.kernel.k_step])
        s.reorder(steps, row, column, k)
        s.tensorize(s.get_loops(running)[-2], self.name + tiles.START)
        return steps, row

    def instruction(self, s: Schedule, lane: Any) -> None:
        s.tensorize(lane, self.name)

    def vectorize_start(self, s: Schedule, block: Any) -> None:
        """The sum's own start, zero, is nothing to do: it goes on top of the running one."""
        s.tensorize(s.get_loops(block)[-2], self.name + tiles.ZERO)

    def vectorize_rows(self, s: Schedule, block: Any) -> None:
        *_, row, column = s.get_loops(block)
        s.tensorize(row if self.rows > 1 else column, self.name + tiles.STORE)
