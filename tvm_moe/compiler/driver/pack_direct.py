"""The fast way of packing: a panel whose columns all exist and whose source has the packed type is transposed from there.

As many source rows as a transposed block has are read from end to end, streams that the CPU can follow: 1.3 times as fast
as by chunks of all NR rows, which is how `pack_panel` converts.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ..intrin import transpose, with_llvm
from ..intrin.prefetch import prefetch
from ..intrin.transpose import LINE

AHEAD = 8  # lines of a row that are on their way: 2 took 1.07 times as long with rows of 12 lines


def pack_direct(kernel: MicroKernel) -> tirx.PrimFunc:
    """``groups`` K groups, a multiple of the transposed block's, of one panel; ``sums`` [NR]: see `transpose.llvm_ir`."""
    NR, group, size = kernel.NR, kernel.group, kernel.weight_size
    unit, with_sums = group * size, bool(kernel.offset)
    LANES = transpose.lanes(unit)

    @T.prim_func(private=True, s_tir=True)
    def pack_direct(
        src: T.handle(kernel.weight), rows: T.handle("int64"), row_step: T.int64, n_stride: T.int64, groups: T.int64,
        out: T.handle(kernel.weight), sums: T.handle("int32"),
    ) -> None:  # fmt: skip
        W = T.decl_buffer((groups, NR, group), kernel.weight, data=out)
        R = T.decl_buffer((NR,), "int64", data=rows)
        B = T.decl_buffer((NR,), "int32", data=sums)
        step: T.let = row_step * n_stride * T.int64(size)
        blocks: T.let = groups // T.int64(LANES)
        for c in range(T.int64(NR // LANES)):
            first: T.let = R[c * T.int64(LANES)] * T.int64(size)
            for v in range(blocks):
                at: T.let = first + v * T.int64(LINE)
                past: T.let = v + T.int64(AHEAD) - blocks  # lines past the rows' end: those of the rows that follow
                ahead: T.let = T.if_then_else(
                    past < T.int64(0), at + T.int64(AHEAD * LINE), first + T.int64(LANES) * step + past * T.int64(LINE)
                )
                for i in range(T.int64(LANES)):
                    T.evaluate(prefetch(T.handle_add_byte_offset(src, ahead + i * step)))
                T.evaluate(
                    transpose.call(
                        unit,
                        T.handle_add_byte_offset(src, at), step,
                        T.address_of(W[v * T.int64(LANES), c * T.int64(LANES), 0]), T.int64(NR * unit),
                        T.address_of(B[c * T.int64(LANES)]) if with_sums else None,
                    )
                )  # fmt: skip

    return with_llvm(pack_direct, transpose.llvm_ir(unit, with_sums))
