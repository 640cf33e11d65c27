"""Pairs of rows times pairs of columns: each instruction takes two rows and two columns into a 2x2 block (Arm smmla, bfmmla).

The panel is passed in blocks of columns, so that the accumulators fit the 32 registers beside the operands.
"""

from __future__ import annotations

from typing import Any

from tvm.s_tir import Schedule

from tvm_moe.compiler import intrin
from tvm_moe.compiler.compute import column_block
from tvm_moe.compiler.intrin.dot import ALONE

from .skeleton import Decision, TileSchedule


class PairProduct(TileSchedule):
    def decisions(self) -> tuple[Decision, ...]:
        return (
            Decision("prefetch", (0, 2, 4), 0),
            Decision("unroll", (1, 2, 4, 8, 16), 16),
            Decision("stream", (0, 1), 1),  # operands by loads of several vectors
        )

    def tile_loops(self, s: Schedule, acc: Any, decided: dict[str, Any]) -> tuple[Any, Any]:
        out = s.get_sblock("out")
        row, column = s.get_loops(out)
        block, column = s.split(column, [None, column_block(self.rows)])
        s.reorder(block, row, column)
        if self.rows > 1:  # of a row alone, TVM would leave out the instruction's second one
            s.compute_at(acc, block, preserve_unit_loops=True)
        *_, ro, co, ri, ci, k = s.get_loops(acc)
        k_outer, k_inner = s.split(k, [None, self.kernel.group])
        # Outside the operand of more registers: it comes in several loads, beside all of the other one.
        pairs = (ro, co) if self.rows > column_block(self.rows) else (co, ro)
        s.reorder(k_outer, *pairs, ri, ci, k_inner)
        for loop in (ro, co):
            s.unroll(loop)
        return k_outer, ri

    def instruction(self, s: Schedule, lane: Any) -> None:
        assert self.kernel.intrinsic is not None
        name = intrin.family(self.kernel.intrinsic).tensor_intrin()
        s.tensorize(lane, name if self.rows > 1 else name + ALONE)

    def vectorize_start(self, s: Schedule, block: Any) -> None:
        _, *pairs, ri, ci = s.get_loops(block)  # of the column block; of pairs; within one
        s.vectorize(s.fuse(ri, ci))
        for loop in pairs:
            s.unroll(loop)

    def vectorize_rows(self, s: Schedule, block: Any) -> None:
        """Half a register at a time: two columns of a row."""
        *_, row, column = s.get_loops(block)
        (ro, ri), (co, ci) = s.split(row, [None, min(2, self.rows)]), s.split(column, [None, 2])
        s.reorder(ro, co, ri, ci)
        s.vectorize(ci)
        for loop in (ro, co, ri):
            s.unroll(loop)
