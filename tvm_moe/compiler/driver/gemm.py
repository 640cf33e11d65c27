"""The two GEMM stages: a block of an expert's rows against packed weight panels."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import GlobalVar
from tvm.script import tirx as T

from ...kernels import MicroKernel
from .. import intrin
from ..compute import adds_last
from ..intrin.prefetch import prefetch
from .names import FEW, FIELDS, MANY, F, N

FIRST_LINES = 16  # of the next panel; the hardware's prefetcher has found the stream by then


def first_row(kernel: MicroKernel, n: tirx.PrimExpr, i: tirx.PrimExpr, tiles: tirx.PrimExpr) -> tirx.PrimExpr:
    """Where tile ``i`` of a block of ``n`` rows begins: equal tiles of whole row groups, the end for ``i == tiles``."""
    g = kernel.row_group
    return tirx.truncdiv(n * i, tiles) if g == 1 else tirx.min(n, tirx.truncdiv((n + (g - 1)) // g * i, tiles) * g)


def loose(kernel: MicroKernel, n: tirx.PrimExpr) -> tirx.PrimExpr:
    """Whether a block of ``n`` rows is not interleaved: a row alone lies so anyway, and few rows may be gathered."""
    return n <= kernel.loose


def filled(kernel: MicroKernel, rows: tirx.PrimExpr) -> tirx.PrimExpr:
    """Rows up to a whole row group; few rows have tiles of their own."""
    g = kernel.row_group
    return rows if g == 1 else tirx.Select(loose(kernel, rows), rows, (rows + (g - 1)) // g * g)


def own_rows(kernel: MicroKernel, P: tirx.Buffer, th: tirx.PrimExpr) -> tirx.PrimExpr:
    """Where in scratch a thread rearranges the rows of a block."""
    return P[F.AT_ROWS_IN] + th * P[F.ROW_BLOCK] * tirx.max(P[F.X_LD], P[F.H_LD]) * kernel.activation_size


def finished_rows(kernel: MicroKernel, P: tirx.Buffer, first: tirx.PrimExpr) -> tirx.PrimExpr:
    """Where in scratch the down stage reads the block whose first row is ``first``."""
    return P[F.AT_H] + first * P[F.H_LD] * kernel.activation_size


def slice_step(kernel: MicroKernel, tiles: tirx.PrimExpr, follows: tirx.PrimExpr) -> tirx.PrimExpr:
    """Bytes of a K step that a tile prefetches: an equal share of what comes next, so that memory works all the time."""
    share = T.truncdiv(T.int64(kernel.NR * kernel.k_step * kernel.weight_size), tiles)
    if kernel.lone_ahead:
        return T.if_then_else(tirx.all(tiles > T.int64(1), follows == T.int64(0)), T.int64(0), share)
    return T.if_then_else(tirx.any(tiles == T.int64(1), follows == T.int64(0)), T.int64(0), share)


def slice_from(
    kernel: MicroKernel, tiles: tirx.PrimExpr, here: tirx.PrimExpr, step: tirx.PrimExpr, share: tirx.PrimExpr
) -> tirx.PrimExpr:
    """Where a tile prefetches from: ``share``, or where it is alone, further on in the chunk at ``here``."""
    if kernel.lone_ahead:
        share = T.if_then_else(tiles == T.int64(1), here + T.int64(kernel.lone_ahead), share)
    return T.if_then_else(step == T.int64(0), here, share)


def panel(kernel: MicroKernel, stage: str) -> tirx.PrimFunc:
    """All rows of a block against one panel: chunks of K outside, so that a chunk of the panel stays in L2.

    Weights come from memory once: while several tiles pass a chunk, each prefetches a slice of what comes next, the next
    chunk or the panel ``ahead`` bytes from this one (0: unknown). A lone tile does not: it is bound by memory already, and
    prefetching by instruction was slower than the hardware's own (22 against 26 GB/s from one core; 3 to 5 % at 64 tokens).
    But the hardware does not run far ahead of a tile that computes for longer (``lone_ahead``): at 4 rows of vpmaddwd it is
    1.4 times as fast, on 512 bits 1.06 times.

    Where a block's rows lie one after the other and are not in L2 yet (``rows_cold`` 1), each tile asks for the next one's;
    the last asks for those ``rows_ahead`` bytes from ``x``, the next item's (0: unknown). The hardware does not foresee
    rows that broadcasts read four bytes at a time: 1.1 times as fast at 4096 tokens, where they come from memory.
    """
    MR, NR, interleaved = kernel.MR, kernel.NR, kernel.row_group > 1
    tile, tile_more = N.tile[stage], N.tile_more[stage] if adds_last(kernel) else N.tile[stage]
    k_bytes, x_bytes = kernel.group * kernel.weight_size, kernel.group * kernel.activation_size
    depth, thread = kernel.depth, intrin.thread_state(kernel.intrinsic)

    @T.prim_func(private=True, s_tir=True)
    def panel(
        n: T.int64, x: T.handle, x_ld: T.int64, rows: T.handle, w: T.handle, start: T.handle, acc: T.handle,
        k_groups: T.int64, chunk: T.int64, ahead: T.int64, rows_cold: T.int64, rows_ahead: T.int64,
    ) -> None:  # fmt: skip
        tiles: T.let = (n + T.int64(MR - 1)) // T.int64(MR)
        row_bytes: T.let = x_ld * T.int64(kernel.activation_size)
        for c in range((k_groups + chunk - T.int64(1)) // chunk):
            k0: T.let = c * chunk
            groups: T.let = T.min(chunk, k_groups - k0)
            steps: T.let = groups // T.int64(depth)
            here: T.let = k0 * T.int64(NR * k_bytes)
            follows: T.let = T.if_then_else(k0 + groups == k_groups, ahead, here + groups * T.int64(NR * k_bytes))
            step: T.let = slice_step(kernel, tiles, follows)
            for i in range(tiles):
                r0: T.let = first_row(kernel, n, i, tiles)
                r1: T.let = first_row(kernel, n, i + T.int64(1), tiles)
                computed: T.let = filled(kernel, r1 - r0)
                x_from: T.let = (
                    r0 * row_bytes + k0 * computed * T.int64(x_bytes) if interleaved else k0 * T.int64(x_bytes)
                )
                x_at: T.let = T.handle_add_byte_offset(x, x_from)
                w_at: T.let = T.handle_add_byte_offset(w, here)
                ids: T.let = T.handle_add_byte_offset(rows, r0 * T.int64(4))
                sums: T.let = T.handle_add_byte_offset(acc, r0 * T.int64(NR * 4))
                soon: T.let = slice_from(kernel, tiles, here, step, follows + i * steps * step)
                next_w: T.let = T.handle_add_byte_offset(w, soon)
                next_row: T.let = T.if_then_else(i + T.int64(1) == tiles, rows_ahead, r1 * row_bytes * rows_cold)
                next_x: T.let = T.handle_add_byte_offset(x, next_row)
                # Whole rows while the first chunk passes; the others find them.
                wanted: T.let = tirx.all(c == T.int64(0), next_row != T.int64(0))
                rows_step: T.let = T.if_then_else(wanted, T.truncdiv(T.int64(MR) * row_bytes, steps), T.int64(0))
                thread.shaped(r1 - r0)
                # What the tile is told of its rows: where they are gathered from, or nothing where they lie interleaved.
                if interleaved:
                    if c == T.int64(0):
                        tile(computed, x_at, w_at, ids, start, sums, steps, T.int64(0), next_w, step, next_x, rows_step)
                    else:
                        tile_more(
                            computed, x_at, w_at, ids, sums, sums, steps, T.int64(NR), next_w, step, next_x, rows_step
                        )
                elif c == T.int64(0):
                    tile(
                        computed, x_at, w_at, ids, start, sums, T.int64(0), x_ld, groups, T.int64(0),
                        next_w, step, next_x, rows_step,
                    )  # fmt: skip
                else:
                    tile(
                        computed, x_at, w_at, ids, sums, sums, T.int64(0), x_ld, groups, T.int64(NR),
                        next_w, step, next_x, rows_step,
                    )  # fmt: skip

    return intrin.with_llvm(panel, thread.llvm_ir)


def few_or_many(few: int, stage: str) -> tirx.PrimFunc:
    """The panel functions of a kernel whose blocks of up to ``few`` rows are gathered, and of all others, as one."""
    gathered, interleaved = N.panel[stage + FEW], N.panel[stage + MANY]

    @T.prim_func(private=True, s_tir=True)
    def few_or_many(
        n: T.int64, x: T.handle, x_ld: T.int64, rows: T.handle, w: T.handle, start: T.handle, acc: T.handle,
        k_groups: T.int64, chunk: T.int64, ahead: T.int64, rows_cold: T.int64, rows_ahead: T.int64,
    ) -> None:  # fmt: skip
        if n <= T.int64(few):
            gathered(n, x, x_ld, rows, w, start, acc, k_groups, chunk, ahead, rows_cold, rows_ahead)
        else:
            interleaved(n, x, x_ld, rows, w, start, acc, k_groups, chunk, ahead, rows_cold, rows_ahead)

    return few_or_many


def fetch_lines(at: tirx.PrimExpr, lines: int) -> None:
    """In TVMScript: ask for cache lines that are read soon. The first ones cost a memory latency each otherwise."""
    for line in range(lines):
        T.evaluate(prefetch(T.handle_add_byte_offset(at, T.int64(line * 64))))


def check_panel(kernel: MicroKernel) -> tirx.PrimFunc:
    """`panel` exported, so that tests and `tvm-moe verify` see the accumulators themselves.

    ``temp``: room for the rows and their sums, filled up to a row group, where the kernel interleaves them.
    """
    panel, interleave = N.panel["gate_up"], N.interleave
    interleaved, NR = kernel.row_group > 1, kernel.NR
    unit, thread = kernel.group * kernel.activation_size, intrin.thread_state(kernel.intrinsic)

    def arranged(n: tirx.PrimExpr) -> tirx.PrimExpr:
        return n > kernel.few.MR if kernel.few else tirx.const(interleaved)

    @T.prim_func(s_tir=True)
    def check_panel(
        n: T.int64, x: T.handle, x_ld: T.int64, rows: T.handle, w: T.handle, start: T.handle, acc: T.handle,
        k_groups: T.int64, chunk: T.int64, temp: T.handle,
    ) -> None:  # fmt: skip
        T.func_attr({"global_symbol": "check_panel"})
        thread.entered()
        if arranged(n):
            from_temp: T.let = filled(kernel, n) * k_groups * T.int64(unit)
            sums: T.let = T.handle_add_byte_offset(temp, from_temp)
            interleave(n, x, x_ld, rows, k_groups, temp)
            panel(n, temp, x_ld, rows, w, start, sums, k_groups, chunk, T.int64(0), T.int64(0), T.int64(0))
            S = T.decl_buffer((n * T.int64(NR),), "int32", data=T.handle_add_byte_offset(temp, from_temp))
            A = T.decl_buffer((n * T.int64(NR),), "int32", data=acc)
            for i in range(n * T.int64(NR)):
                A[i] = S[i]
        else:
            panel(n, x, x_ld, rows, w, start, acc, k_groups, chunk, T.int64(0), T.int64(0), T.int64(0))
        thread.left()

    return intrin.with_llvm(check_panel, thread.llvm_ir)


def gate_up_item(kernel: MicroKernel) -> tirx.PrimFunc:
    """One block of an expert's rows against a group of gate/up panels, with activation.

    ``new``: 0 where this thread still has the block's rows interleaved.
    """
    NR, size = kernel.NR, kernel.activation_size
    panel_bytes = NR * kernel.group * kernel.weight_size
    interleaved, gathered = kernel.row_group > 1, kernel.few is not None
    staged = interleaved or kernel.dtype == "int8"
    out_size = 4 if kernel.dtype == "int8" else 2
    panel, activate, interleave = N.panel["gate_up"], N.activate, N.interleave
    vector = NR * 4 // 64  # its lines
    scaled = vector if kernel.dtype == "int8" else 0

    @T.prim_func(private=True, s_tir=True)
    def gate_up_item(
        th: T.int64, b: T.int64, g: T.int64, next_at: T.int64, new: T.int64, plan: T.handle("int64"),
        scratch: T.handle, blocks: T.handle("int32"), row_ids: T.handle("int32"),
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        w13: T.let = T.handle_add_byte_offset(plan, P[F.FROM_W13])
        start13: T.let = T.handle_add_byte_offset(plan, P[F.FROM_START13])
        scale13: T.let = T.handle_add_byte_offset(plan, P[F.FROM_SCALE13])
        bias13: T.let = T.handle_add_byte_offset(plan, P[F.FROM_BIAS13])
        alpha: T.let = T.reinterpret(T.Cast("int32", P[F.ALPHA]), dtype="float32")
        limit: T.let = T.reinterpret(T.Cast("int32", P[F.LIMIT]), dtype="float32")
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        e: T.let = T.Cast("int64", B[b])
        first: T.let = T.Cast("int64", B[P[F.BLOCKS_MAX] + b])
        n: T.let = T.Cast("int64", B[2 * P[F.BLOCKS_MAX] + b])
        rows: T.let = T.handle_add_byte_offset(scratch, P[F.AT_ROWS] + first * T.int64(4))
        acc: T.let = T.handle_add_byte_offset(scratch, P[F.AT_ACC] + th * P[F.ROW_BLOCK] * T.int64(NR * 4))
        # Rows that are quantized (from f32) or interleaved stay in a ring of blocks until they are complete.
        row: T.let = b % P[F.RING_H] * P[F.ROW_BLOCK] if staged else first
        h: T.let = T.handle_add_byte_offset(
            scratch, (P[F.AT_HF] if staged else P[F.AT_H]) + row * P[F.H_LD] * T.int64(out_size)
        )
        R = T.decl_buffer((P[F.TOKENS] * P[F.TOP_K],), "int32", data=row_ids)
        alone: T.let = P[F.AT_X] + T.Cast("int64", R[first]) * P[F.X_LD] * T.int64(size)
        few: T.let = P[F.AT_X] if gathered else alone
        x: T.let = T.handle_add_byte_offset(
            scratch, T.if_then_else(loose(kernel, n), few, own_rows(kernel, P, th)) if interleaved else P[F.AT_X]
        )
        if interleaved:  # noqa: SIM102  (Python decides about this one, the compiled code about the next)
            if new != T.int64(0) and n > T.int64(kernel.loose):
                interleave(n, T.handle_add_byte_offset(scratch, P[F.AT_X]), P[F.X_LD], rows, P[F.K13], x)
        panels: T.let = T.min(P[F.GROUP13], P[F.PANELS13] - g * P[F.GROUP13])
        for i in range(panels):
            p: T.let = g * P[F.GROUP13] + i
            at: T.let = e * P[F.PANELS13] + p
            soon: T.let = T.if_then_else(i + T.int64(1) < panels, at + T.int64(1), next_at)
            fetch_lines(T.handle_add_byte_offset(w13, soon * P[F.K13] * T.int64(panel_bytes)), FIRST_LINES)
            fetch_lines(T.handle_add_byte_offset(start13, soon * P[F.START_STRIDE] * T.int64(4)), scaled)
            fetch_lines(T.handle_add_byte_offset(scale13, soon * T.int64(NR * 4)), scaled)
            fetch_lines(T.handle_add_byte_offset(bias13, soon * P[F.BIAS13_STRIDE] * T.int64(4)), vector)
            panel(
                n, x, P[F.X_LD], rows,
                T.handle_add_byte_offset(w13, at * P[F.K13] * T.int64(panel_bytes)),
                T.handle_add_byte_offset(start13, at * P[F.START_STRIDE] * T.int64(4)),
                acc, P[F.K13], P[F.CHUNK13],
                P[F.K13] * T.int64(panel_bytes) * (soon - at), T.int64(0), T.int64(0),
            )  # fmt: skip
            activate(
                P[F.ACTIVATION], acc, T.handle_add_byte_offset(scratch, P[F.AT_X_SCALE]), rows,
                T.handle_add_byte_offset(scale13, at * T.int64(NR * 4)),
                T.handle_add_byte_offset(bias13, at * P[F.BIAS13_STRIDE] * T.int64(4)),
                alpha, limit, T.handle_add_byte_offset(h, p * P[F.HALF] * T.int64(out_size)),
                n, T.int64(0), P[F.H_LD],
            )  # fmt: skip

    return gate_up_item


def down_item(kernel: MicroKernel, panel: GlobalVar) -> tirx.PrimFunc:
    """One block's intermediate rows against a group of down panels; the sums stay as they are until they are combined."""
    NR, size = kernel.NR, kernel.activation_size
    panel_bytes = NR * kernel.group * kernel.weight_size
    scaled = NR * 4 // 64 if kernel.dtype == "int8" else 0  # lines of a vector

    @T.prim_func(private=True, s_tir=True)
    def down_item(
        g: T.int64, b: T.int64, next_at: T.int64, next_first: T.int64, plan: T.handle("int64"), scratch: T.handle,
        blocks: T.handle("int32"),
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        w2: T.let = T.handle_add_byte_offset(plan, P[F.FROM_W2])
        start2: T.let = T.handle_add_byte_offset(plan, P[F.FROM_START2])
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        e: T.let = T.Cast("int64", B[b])
        first: T.let = T.Cast("int64", B[P[F.BLOCKS_MAX] + b])
        n: T.let = T.Cast("int64", B[2 * P[F.BLOCKS_MAX] + b])
        iota: T.let = T.handle_add_byte_offset(scratch, P[F.AT_IOTA])
        x: T.let = T.handle_add_byte_offset(scratch, finished_rows(kernel, P, first))
        panels: T.let = T.min(P[F.GROUP2], P[F.PANELS2] - g * P[F.GROUP2])
        for p in range(panels):
            at: T.let = e * P[F.PANELS2] + g * P[F.GROUP2] + p
            soon: T.let = T.if_then_else(p + T.int64(1) < panels, at + T.int64(1), next_at)
            fetch_lines(T.handle_add_byte_offset(w2, soon * P[F.K2] * T.int64(panel_bytes)), FIRST_LINES)
            fetch_lines(T.handle_add_byte_offset(start2, soon * P[F.START_STRIDE] * T.int64(4)), scaled)
            y: T.let = P[F.AT_Y] + ((g % P[F.RING_Y] * P[F.GROUP2] + p) * P[F.ROWS] + first) * T.int64(NR * 4)
            panel(
                n, x, P[F.H_LD], iota,
                T.handle_add_byte_offset(w2, at * P[F.K2] * T.int64(panel_bytes)),
                T.handle_add_byte_offset(start2, at * P[F.START_STRIDE] * T.int64(4)),
                T.handle_add_byte_offset(scratch, y), P[F.K2], P[F.CHUNK2],
                P[F.K2] * T.int64(panel_bytes) * (soon - at),
                T.if_then_else(p == T.int64(0), T.int64(1), T.int64(0)),
                T.if_then_else(p + T.int64(1) == panels, (next_first - first) * P[F.H_LD] * T.int64(size), T.int64(0)),
            )  # fmt: skip

    return down_item
