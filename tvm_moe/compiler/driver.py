"""The driver of a layer in TVMScript: tiles, then one parallel region in which threads take work items by ticket.

Items are numbered prepare < gate/up < down, and every wait of an item is for items with lower numbers. Tickets are given
out in order, so whatever an item waits for is finished or being worked on: no barrier, and no deadlock with any number
of threads, one included. Hot experts cost many items, not one long one: work is balanced by cost.

`names` maps the tile functions (compiled TE, see `module`) to GlobalVars; all pointers are raw, all sizes 64-bit.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import GlobalVar
from tvm.script import tirx as T

from ..kernels import MicroKernel
from ..plan import PREPARE_ROWS, Field

F = Field
FIELDS = len(Field)
SLICE_LINES = 2  # cache lines a tile prefetches per K group of the chunk that follows


class N:
    """The private functions of a module that the driver calls."""

    tile = GlobalVar("tile")
    activate = GlobalVar("activate")
    epilogue_down = GlobalVar("epilogue_down")
    prepare = GlobalVar("prepare")
    combine = GlobalVar("combine")
    combine_tail = GlobalVar("combine_tail")
    panel = GlobalVar("panel")
    prepare_item = GlobalVar("prepare_item")
    gate_up_item = GlobalVar("gate_up_item")
    finish_block = GlobalVar("finish_block")
    down_item = GlobalVar("down_item")
    combine_item = GlobalVar("combine_item")
    worker = GlobalVar("worker")


def panel(kernel: MicroKernel) -> tirx.PrimFunc:
    """All rows of a block against one panel: chunks of K outside, so that a chunk of the panel stays in L2.

    Weights come from memory once: while several tiles pass a chunk, each prefetches a slice of what comes next, the next
    chunk or the panel ``ahead`` bytes from this one (0: unknown). A lone tile does not: it is bound by memory already, and
    prefetching by instruction was slower than the hardware's own (22 against 26 GB/s from one core).
    """
    MR, NR = kernel.MR, kernel.NR
    k_bytes = kernel.group * kernel.itemsize
    SLICES = -(-NR * k_bytes // (64 * SLICE_LINES))
    tile = N.tile

    @T.prim_func(private=True, s_tir=True)
    def panel(
        n: T.int64, x: T.handle, x_ld: T.int64, rows: T.handle, w: T.handle, start: T.handle, acc: T.handle,
        k_groups: T.int64, chunk: T.int64, ahead: T.int64,
    ) -> None:  # fmt: skip
        tiles: T.let = (n + T.int64(MR - 1)) // T.int64(MR)
        for c in range((k_groups + chunk - T.int64(1)) // chunk):
            k0: T.let = c * chunk
            groups: T.let = T.min(chunk, k_groups - k0)
            here: T.let = k0 * T.int64(NR * k_bytes)
            follows: T.let = T.if_then_else(k0 + groups == k_groups, ahead, here + groups * T.int64(NR * k_bytes))
            slices: T.let = T.if_then_else(tiles == T.int64(1) or follows == T.int64(0), T.int64(0), T.int64(SLICES))
            for i in range(tiles):
                r0: T.let = n * i // tiles
                r1: T.let = n * (i + T.int64(1)) // tiles
                part: T.let = follows + i * groups * T.int64(64 * SLICE_LINES)
                x_at: T.let = T.handle_add_byte_offset(x, k0 * T.int64(k_bytes))
                w_at: T.let = T.handle_add_byte_offset(w, here)
                ids: T.let = T.handle_add_byte_offset(rows, r0 * T.int64(4))
                sums: T.let = T.handle_add_byte_offset(acc, r0 * T.int64(NR * 4))
                next_w: T.let = T.handle_add_byte_offset(w, T.if_then_else(i < slices, part, here))
                if c == T.int64(0):
                    tile(r1 - r0, x_at, w_at, ids, start, sums, T.int64(0), x_ld, groups, T.int64(0), next_w)
                else:
                    tile(r1 - r0, x_at, w_at, ids, sums, sums, T.int64(0), x_ld, groups, T.int64(NR), next_w)

    return panel


def check_panel() -> tirx.PrimFunc:
    """`panel` exported, so that tests and `tvm-moe verify` see the accumulators themselves."""
    panel = N.panel

    @T.prim_func(s_tir=True)
    def check_panel(
        n: T.int64, x: T.handle, x_ld: T.int64, rows: T.handle, w: T.handle, start: T.handle, acc: T.handle,
        k_groups: T.int64, chunk: T.int64,
    ) -> None:  # fmt: skip
        T.func_attr({"global_symbol": "check_panel"})
        panel(n, x, x_ld, rows, w, start, acc, k_groups, chunk, T.int64(0))

    return check_panel


def prepare_item(kernel: MicroKernel) -> tirx.PrimFunc:
    """Quantize (INT8) or convert (BF16) a few rows of hidden_states; the K padding must be finite: zero."""
    size, sources = kernel.itemsize, T.int64(2)
    prepare = N.prepare

    @T.prim_func(private=True, s_tir=True)
    def prepare_item(
        i: T.int64, x: T.handle, x_code: T.int64, plan: T.handle("int64"), scratch: T.handle,
        prepared: T.handle(kernel.activation),
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        t0: T.let = i * T.int64(PREPARE_ROWS)
        n: T.let = T.min(T.int64(PREPARE_ROWS), P[F.TOKENS] - t0)
        prepare(
            x_code,
            T.handle_add_byte_offset(x, t0 * P[F.X_STRIDE] * sources * (x_code + T.int64(1))),
            T.handle_add_byte_offset(scratch, P[F.AT_FACTOR] + t0 * T.int64(4)),
            T.handle_add_byte_offset(scratch, P[F.AT_X_SCALE] + t0 * T.int64(4)),
            T.handle_add_byte_offset(scratch, P[F.AT_X] + t0 * P[F.X_LD] * T.int64(size)),
            n, P[F.HIDDEN], P[F.X_STRIDE], P[F.X_LD],
        )  # fmt: skip
        X = T.decl_buffer((P[F.TOKENS] * P[F.X_LD],), kernel.activation, data=prepared)
        for r in range(n):
            for c in range(P[F.X_LD] - P[F.HIDDEN]):
                X[(t0 + r) * P[F.X_LD] + P[F.HIDDEN] + c] = T.Cast(kernel.activation, 0)

    return prepare_item


def gate_up_item(kernel: MicroKernel) -> tirx.PrimFunc:
    """One block of an expert's rows against a group of gate/up panels, with activation."""
    NR, size = kernel.NR, kernel.itemsize
    panel_bytes = NR * kernel.group * size
    quantized = kernel.dtype == "int8"
    out_size = 4 if quantized else 2
    panel, activate = N.panel, N.activate

    @T.prim_func(private=True, s_tir=True)
    def gate_up_item(
        th: T.int64, b: T.int64, g: T.int64, next_at: T.int64, plan: T.handle("int64"), scratch: T.handle, blocks: T.handle("int32"),
        w13: T.handle, start13: T.handle, scale13: T.handle, bias13: T.handle,
        activation: T.int64, alpha: T.float32, limit: T.float32,
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        e: T.let = T.Cast("int64", B[b])
        first: T.let = T.Cast("int64", B[P[F.BLOCKS_MAX] + b])
        n: T.let = T.Cast("int64", B[2 * P[F.BLOCKS_MAX] + b])
        rows: T.let = T.handle_add_byte_offset(scratch, P[F.AT_ROWS] + first * T.int64(4))
        acc: T.let = T.handle_add_byte_offset(scratch, P[F.AT_ACC] + th * P[F.ROW_BLOCK] * T.int64(NR * 4))
        # INT8 keeps the intermediate in f32 in a ring of blocks until its rows are complete; BF16 is rounded at once.
        row: T.let = b % P[F.RING_H] * P[F.ROW_BLOCK] if quantized else first
        h: T.let = T.handle_add_byte_offset(
            scratch, (P[F.AT_HF] if quantized else P[F.AT_H]) + row * P[F.H_LD] * T.int64(out_size)
        )
        panels: T.let = T.min(P[F.GROUP13], P[F.PANELS13] - g * P[F.GROUP13])
        for p_in_group in range(panels):
            p: T.let = g * P[F.GROUP13] + p_in_group
            at: T.let = e * P[F.PANELS13] + p
            panel(
                n, T.handle_add_byte_offset(scratch, P[F.AT_X]), P[F.X_LD], rows,
                T.handle_add_byte_offset(w13, at * P[F.K13] * T.int64(panel_bytes)),
                T.handle_add_byte_offset(start13, at * P[F.START_STRIDE] * T.int64(4)),
                acc, P[F.K13], P[F.CHUNK13],
                P[F.K13] * T.int64(panel_bytes) * T.if_then_else(p_in_group + T.int64(1) < panels, T.int64(1), next_at - at),
            )  # fmt: skip
            activate(
                activation, acc, T.handle_add_byte_offset(scratch, P[F.AT_X_SCALE]), rows,
                T.handle_add_byte_offset(scale13, at * T.int64(NR * 4)),
                T.handle_add_byte_offset(bias13, at * P[F.BIAS13_STRIDE] * T.int64(4)),
                alpha, limit, T.handle_add_byte_offset(h, p * P[F.HALF] * T.int64(out_size)),
                n, T.int64(0), P[F.H_LD],
            )  # fmt: skip

    return gate_up_item


def finish_block(kernel: MicroKernel) -> tirx.PrimFunc:
    """INT8: quantize a block's complete intermediate rows, while they are still in cache. BF16: nothing is left."""
    size = kernel.itemsize
    prepare = N.prepare

    @T.prim_func(private=True, s_tir=True)
    def nothing(b: T.int64, plan: T.handle("int64"), scratch: T.handle, blocks: T.handle("int32")) -> None:
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def finish_block(b: T.int64, plan: T.handle("int64"), scratch: T.handle, blocks: T.handle("int32")) -> None:
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        first: T.let = T.Cast("int64", B[P[F.BLOCKS_MAX] + b])
        prepare(
            T.int64(1),
            T.handle_add_byte_offset(
                scratch, P[F.AT_HF] + b % P[F.RING_H] * P[F.ROW_BLOCK] * P[F.H_LD] * T.int64(4)
            ),
            T.handle_add_byte_offset(scratch, P[F.AT_ONES]),
            T.handle_add_byte_offset(scratch, P[F.AT_H_SCALE] + first * T.int64(4)),
            T.handle_add_byte_offset(scratch, P[F.AT_H] + first * P[F.H_LD] * T.int64(size)),
            T.Cast("int64", B[2 * P[F.BLOCKS_MAX] + b]), P[F.H_LD], P[F.H_LD], P[F.H_LD],
        )  # fmt: skip

    return finish_block if kernel.dtype == "int8" else nothing


def down_item(kernel: MicroKernel) -> tirx.PrimFunc:
    """One block's intermediate rows against a group of down panels; results stay in f32, a row per slot."""
    NR, size = kernel.NR, kernel.itemsize
    panel_bytes = NR * kernel.group * size
    panel, epilogue_down = N.panel, N.epilogue_down

    @T.prim_func(private=True, s_tir=True)
    def down_item(
        th: T.int64, g: T.int64, b: T.int64, next_at: T.int64, plan: T.handle("int64"), scratch: T.handle, blocks: T.handle("int32"),
        w2: T.handle, start2: T.handle, scale2: T.handle, bias2: T.handle,
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        e: T.let = T.Cast("int64", B[b])
        first: T.let = T.Cast("int64", B[P[F.BLOCKS_MAX] + b])
        n: T.let = T.Cast("int64", B[2 * P[F.BLOCKS_MAX] + b])
        iota: T.let = T.handle_add_byte_offset(scratch, P[F.AT_IOTA])
        acc: T.let = T.handle_add_byte_offset(scratch, P[F.AT_ACC] + th * P[F.ROW_BLOCK] * T.int64(NR * 4))
        slots: T.let = P[F.TOKENS] * P[F.TOP_K]
        panels: T.let = T.min(P[F.GROUP2], P[F.PANELS2] - g * P[F.GROUP2])
        for p in range(panels):
            at: T.let = e * P[F.PANELS2] + g * P[F.GROUP2] + p
            panel(
                n, T.handle_add_byte_offset(scratch, P[F.AT_H] + first * P[F.H_LD] * T.int64(size)), P[F.H_LD], iota,
                T.handle_add_byte_offset(w2, at * P[F.K2] * T.int64(panel_bytes)),
                T.handle_add_byte_offset(start2, at * P[F.START_STRIDE] * T.int64(4)),
                acc, P[F.K2], P[F.CHUNK2],
                P[F.K2] * T.int64(panel_bytes) * T.if_then_else(p + T.int64(1) < panels, T.int64(1), next_at - at),
            )  # fmt: skip
            epilogue_down(
                acc, T.handle_add_byte_offset(scratch, P[F.AT_H_SCALE] + first * T.int64(4)), iota,
                T.handle_add_byte_offset(scale2, at * T.int64(NR * 4)),
                T.handle_add_byte_offset(bias2, at * P[F.BIAS2_STRIDE] * T.int64(4)),
                T.handle_add_byte_offset(
                    scratch,
                    P[F.AT_Y] + ((g % P[F.RING_Y] * P[F.GROUP2] + p) * slots + first) * T.int64(NR * 4),
                ),
                n, T.int64(0),
            )  # fmt: skip

    return down_item


def combine_item(kernel: MicroKernel) -> tirx.PrimFunc:
    """Sum the slots of every token for the columns of one panel group."""
    NR = kernel.NR
    combine, combine_tail = N.combine, N.combine_tail

    @T.prim_func(private=True, s_tir=True)
    def combine_item(
        g: T.int64, plan: T.handle("int64"), scratch: T.handle, weights: T.handle, out: T.handle, x_code: T.int64
    ) -> None:
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        slots: T.let = P[F.TOKENS] * P[F.TOP_K]
        position: T.let = T.handle_add_byte_offset(scratch, P[F.AT_POSITION])
        for p in range(T.min(P[F.GROUP2], P[F.PANELS2] - g * P[F.GROUP2])):
            column: T.let = (g * P[F.GROUP2] + p) * T.int64(NR)
            y: T.let = T.handle_add_byte_offset(
                scratch, P[F.AT_Y] + (g % P[F.RING_Y] * P[F.GROUP2] + p) * slots * T.int64(NR * 4)
            )
            target: T.let = T.handle_add_byte_offset(out, column * T.int64(2) * (x_code + T.int64(1)))
            if P[F.HIDDEN] - column >= T.int64(NR):
                combine(x_code, y, position, weights, target, slots, P[F.TOKENS], P[F.TOP_K], P[F.OUT_STRIDE])
            else:
                combine_tail(
                    x_code, y, position, weights, target, slots, P[F.TOKENS], P[F.TOP_K], P[F.HIDDEN] - column,
                    P[F.OUT_STRIDE],
                )  # fmt: skip

    return combine_item
