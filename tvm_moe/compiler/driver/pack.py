"""Packing in TVMScript: one expert's matrix [N, K] (rows contiguous) into panels [panels, K / group, NR, group].

Column c of gate/up panel p is intermediate column ``p * half + c % half`` of part ``c // half`` (gate, then up); its source
row is ``i * row_step + part * part_step``. Columns past the end and K past the end are zero, so that any H and I work.
Start values of an offset kernel undo the offset: ``-offset * sum_k w[n, k]``.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ...plan import pack_row, pack_temp_bytes
from .names import MATRIX_FIELDS, M, N

PIECE_BYTES = 4 << 20  # of the packed layer
SOURCES = {0: "uint16", 1: "float32", 2: "int8"}  # source codes; uint16 holds bf16


def sources(kernel: MicroKernel) -> dict[int, str]:
    """INT8 takes stored int8 weights and quantizes the others; BF16 takes floating weights."""
    return {code: s for code, s in SOURCES.items() if kernel.dtype == "int8" or s != "int8"}


def pack_part(kernel: MicroKernel) -> tirx.PrimFunc:
    """A thread's part of one matrix: panels ``first`` to ``end``."""
    pack_panel, NR = N.pack_panel, kernel.NR
    rows_from = NR * pack_row(kernel) * kernel.weight_size
    panel_group = NR * kernel.group * kernel.weight_size

    @T.prim_func(private=True, s_tir=True)
    def pack_part(matrix: T.handle("int64"), first: T.int64, end: T.int64, temp: T.handle) -> None:
        J = T.decl_buffer((MATRIX_FIELDS,), "int64", data=matrix)
        for q in range(end - first):
            p: T.let = first + q
            vectors: T.let = p * T.int64(NR * 4)
            pack_panel(
                J[M.SOURCE], T.handle_add_byte_offset(matrix, J[M.AT_FROM]), p, J[M.ROW_STEP], J[M.PART_STEP],
                J[M.N_STRIDE], J[M.VALID], J[M.K], J[M.HALF], J[M.GROUPS],
                T.handle_add_byte_offset(matrix, J[M.AT_PACKED] + p * J[M.GROUPS] * T.int64(panel_group)),
                T.handle_add_byte_offset(matrix, J[M.AT_START] + vectors),
                T.handle_add_byte_offset(matrix, J[M.AT_SCALE] + vectors),
                temp,
                T.handle_add_byte_offset(temp, T.int64(rows_from)),
                T.handle_add_byte_offset(temp, T.int64(rows_from + NR * 8)),
            )  # fmt: skip

    return pack_part


def entry(kernel: MicroKernel) -> tirx.PrimFunc:
    """The exported ``pack``: ``count`` matrices in one parallel region, cut by K groups into pieces that threads take.

    ``temp`` holds `plan.pack_temp_bytes` a thread. New memory costs its page faults, a large part of the time, and threads
    that get unequal shares of them would wait for each other; pieces are larger than a huge page, which two threads that
    meet in it would both clear.
    """
    pack_part, each = N.pack_part, pack_temp_bytes(kernel)
    piece_groups = max(1, PIECE_BYTES // (kernel.NR * kernel.group * kernel.weight_size))

    @T.prim_func(s_tir=True)
    def pack(matrices: T.handle("int64"), count: T.int64, temp: T.handle, threads: T.int64) -> None:
        T.func_attr({"global_symbol": "pack", "tirx.noalias": True})
        J = T.decl_buffer((count, MATRIX_FIELDS), "int64", data=matrices)
        total = T.alloc_buffer((2,), "int64", scope="local")  # cost of all; pieces taken
        total[0] = T.int64(0)
        total[1] = T.int64(0)
        for m in range(count):
            total[0] = total[0] + J[m, M.PANELS] * J[m, M.GROUPS]
        cost: T.let = total[0]
        pieces: T.let = T.max(threads, cost // T.int64(piece_groups))
        T.evaluate(T.call_extern("int32", "moe_set_threads", T.Cast("int32", threads)))
        for th in T.parallel(threads):
            mine = T.alloc_buffer((2,), "int64", scope="local")  # piece; cost before the matrix
            mine[0] = T.call_extern("int64", "moe_add", T.address_of(total[1]), T.int64(1)) - T.int64(1)
            while mine[0] < pieces:
                mine[1] = T.int64(0)
                for m in range(count):
                    groups: T.let = J[m, M.GROUPS]
                    # A panel is of the piece in which its cost begins.
                    first: T.let = (mine[0] * cost // pieces - mine[1] + groups - T.int64(1)) // groups
                    end: T.let = ((mine[0] + T.int64(1)) * cost // pieces - mine[1] + groups - T.int64(1)) // groups
                    lo: T.let = T.max(T.int64(0), T.min(first, J[m, M.PANELS]))
                    hi: T.let = T.max(T.int64(0), T.min(end, J[m, M.PANELS]))
                    pack_part(T.address_of(J[m, 0]), lo, hi, T.handle_add_byte_offset(temp, th * T.int64(each)))
                    mine[1] = mine[1] + J[m, M.PANELS] * groups
                mine[0] = T.call_extern("int64", "moe_add", T.address_of(total[1]), T.int64(1)) - T.int64(1)

    return pack
