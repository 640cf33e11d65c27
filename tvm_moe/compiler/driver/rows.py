"""Stages that touch rows only: prepare hidden states, finish a block's intermediate, combine a token's slots."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ...plan import PREPARE_ROWS
from .. import intrin
from .gemm import filled, finished_rows, first_row, loose, own_rows
from .names import FIELDS, F, N

UNROLL = 4  # K steps of a row at a time


def prepare_item(kernel: MicroKernel) -> tirx.PrimFunc:
    """Quantize (INT8) or convert (BF16) a few rows of hidden_states; the K padding must be finite: zero."""
    size, sources = kernel.activation_size, T.int64(2)
    prepare = N.prepare

    @T.prim_func(private=True, s_tir=True)
    def prepare_item(
        i: T.int64, x: T.handle, x_code: T.int64, weights: T.handle, plan: T.handle("int64"), scratch: T.handle,
        prepared: T.handle(kernel.activation),
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        t0: T.let = i * T.int64(PREPARE_ROWS)
        n: T.let = T.min(T.int64(PREPARE_ROWS), P[F.X_ROWS] - t0)
        prepare(
            x_code + T.int64(2) * P[F.ON_INPUT],
            T.handle_add_byte_offset(x, t0 * P[F.X_STRIDE] * sources * (x_code + T.int64(1))),
            T.handle_add_byte_offset(weights, t0 * T.int64(4)),
            T.handle_add_byte_offset(scratch, P[F.AT_X_SCALE] + t0 * T.int64(4)),
            T.handle_add_byte_offset(scratch, P[F.AT_X] + t0 * P[F.X_LD] * T.int64(size)),
            n, P[F.HIDDEN], P[F.X_STRIDE], P[F.X_LD],
        )  # fmt: skip
        X = T.decl_buffer((P[F.X_ROWS] * P[F.X_LD],), kernel.activation, data=prepared)
        for r in range(n):
            for c in range(P[F.X_LD] - P[F.HIDDEN]):
                X[(t0 + r) * P[F.X_LD] + P[F.HIDDEN] + c] = T.Cast(kernel.activation, 0)

    return prepare_item


def gather_item(kernel: MicroKernel) -> tirx.PrimFunc:
    """In place of a gate/up item where a layer has no such projections: a block's rows of hidden_states, zero beyond."""
    staged = kernel.dtype == "int8" or kernel.row_group > 1
    out_type, size = ("float32", 4) if kernel.dtype == "int8" else ("uint16", 2)
    gather = N.gather

    @T.prim_func(private=True, s_tir=True)
    def gather_item(
        b: T.int64, x: T.handle, x_code: T.int64, plan: T.handle("int64"), scratch: T.handle,
        blocks: T.handle("int32"), intermediate: T.handle(out_type),
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        first: T.let = T.Cast("int64", B[P[F.BLOCKS_MAX] + b])
        n: T.let = T.Cast("int64", B[2 * P[F.BLOCKS_MAX] + b])
        row: T.let = b % P[F.RING_H] * P[F.ROW_BLOCK] if staged else first
        H = T.decl_buffer((T.int64(1) << T.int64(40),), out_type, data=intermediate)
        gather(
            x_code, x, T.handle_add_byte_offset(scratch, P[F.AT_ROWS] + first * T.int64(4)),
            T.handle_add_byte_offset(intermediate, row * P[F.H_LD] * T.int64(size)),
            P[F.X_ROWS], P[F.INPUT], P[F.X_STRIDE], n, P[F.H_LD],
        )  # fmt: skip
        for r in range(n):
            for c in range(P[F.H_LD] - P[F.INPUT]):
                H[(row + r) * P[F.H_LD] + P[F.INPUT] + c] = T.Cast(out_type, 0)

    return gather_item


def interleave(kernel: MicroKernel) -> tirx.PrimFunc:
    """A block's rows as its tiles read them, [K steps, rows, step] each, filled up with the tile's last row.

    Where tiles are shaped for the rows there are, they read no others: their places stay as they are.
    """
    MR, exact = kernel.MR, bool(intrin.thread_state(kernel.intrinsic).shape)
    # Of a step; kernels that never interleave may have less than one.
    words = max(1, kernel.k_step * kernel.activation_size // 8)

    @T.prim_func(private=True, s_tir=True)
    def interleave(
        n: T.int64,
        x: T.handle("int64"),
        ld: T.int64,
        rows: T.handle("int32"),
        k_groups: T.int64,
        out: T.handle("int64"),
    ) -> None:
        steps: T.let = k_groups // T.int64(kernel.depth)
        ld_steps: T.let = ld // T.int64(kernel.k_step)
        X = T.decl_buffer((T.int64(1) << T.int64(40), ld_steps, words), "int64", data=x)
        R = T.decl_buffer((n,), "int32", data=rows)
        O = T.decl_buffer((T.int64(1) << T.int64(40), words), "int64", data=out)
        tiles: T.let = (n + T.int64(MR - 1)) // T.int64(MR)
        for i in range(tiles):
            r0: T.let = first_row(kernel, n, i, tiles)
            r1: T.let = first_row(kernel, n, i + T.int64(1), tiles)
            count: T.let = filled(kernel, r1 - r0)
            copied: T.let = r1 - r0 if exact else count
            for r in range(copied):
                row: T.let = T.Cast("int64", R[T.min(r0 + r, r1 - T.int64(1))])
                to: T.let = r0 * ld_steps + r
                for some in range(steps // T.int64(UNROLL)):
                    for u in T.unroll(UNROLL):
                        q: T.let = some * T.int64(UNROLL) + u
                        for v in T.vectorized(words):
                            O[to + q * count, v] = X[row, q, v]
                for rest in range(steps % T.int64(UNROLL)):
                    q: T.let = steps // T.int64(UNROLL) * T.int64(UNROLL) + rest
                    for v in T.vectorized(words):
                        O[to + q * count, v] = X[row, q, v]

    return interleave


def finish_block(kernel: MicroKernel) -> tirx.PrimFunc:
    """A block's complete intermediate, while it is still in cache: quantized (INT8), interleaved (where the kernel is)."""
    size = kernel.activation_size
    quantized, interleaved = kernel.dtype == "int8", kernel.row_group > 1
    tail = quantized and kernel.depth > 1  # a row of whole steps may be longer than whole panels
    prepare, interleave = N.prepare, N.interleave

    @T.prim_func(private=True, s_tir=True)
    def finish_block(
        th: T.int64, b: T.int64, plan: T.handle("int64"), scratch: T.handle, blocks: T.handle("int32")
    ) -> None:
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        first: T.let = T.Cast("int64", B[P[F.BLOCKS_MAX] + b])
        n: T.let = T.Cast("int64", B[2 * P[F.BLOCKS_MAX] + b])
        ring: T.let = P[F.AT_HF] + b % P[F.RING_H] * P[F.ROW_BLOCK] * P[F.H_LD] * T.int64(4 if quantized else size)
        own: T.let = own_rows(kernel, P, th)
        h: T.let = finished_rows(kernel, P, first)
        complete: T.let = T.handle_add_byte_offset(scratch, ring)
        finished: T.let = T.handle_add_byte_offset(scratch, h)
        # Few rows are not interleaved: quantized, they go where they stay.
        rounded: T.let = T.handle_add_byte_offset(
            scratch, T.if_then_else(loose(kernel, n), h, own) if interleaved else h
        )
        if tail:  # noqa: SIM102  (Python decides about this one, the compiled code about the next)
            if P[F.LINEAR] == T.int64(0):
                C = T.decl_buffer((n, P[F.H_LD]), "float32", data=complete)
                columns: T.let = P[F.PANELS13] * P[F.HALF]
                for r in range(n):
                    for c in range(P[F.H_LD] - columns):
                        C[r, columns + c] = T.float32(0)
        if quantized:
            prepare(
                T.int64(1), complete, complete,
                T.handle_add_byte_offset(scratch, P[F.AT_H_SCALE] + first * T.int64(4)),
                rounded, n, P[F.H_LD], P[F.H_LD], P[F.H_LD],
            )  # fmt: skip
        if not quantized and not interleaved:
            T.evaluate(0)
        if interleaved:  # noqa: SIM102  (Python decides about this one, the compiled code about the next)
            if n > T.int64(kernel.loose if quantized else 0):
                interleave(
                    n, rounded if quantized else complete, P[F.H_LD],
                    T.handle_add_byte_offset(scratch, P[F.AT_IOTA]), P[F.H_LD] // T.int64(kernel.group), finished,
                )  # fmt: skip

    return finish_block


def combine_item(kernel: MicroKernel) -> tirx.PrimFunc:
    """Sum the slots of some tokens, one of COMBINE_PARTS equal parts, for the columns of one panel group."""
    NR = kernel.NR
    combine, combine_tail = N.combine, N.combine_tail

    @T.prim_func(private=True, s_tir=True)
    def combine_item(
        g: T.int64, part: T.int64, plan: T.handle("int64"), scratch: T.handle, weights: T.handle, out: T.handle,
        x_code: T.int64,
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        t0: T.let = part * P[F.TOKENS] // P[F.COMBINE_PARTS]
        n: T.let = (part + T.int64(1)) * P[F.TOKENS] // P[F.COMBINE_PARTS] - t0
        slots: T.let = t0 * P[F.TOP_K] * T.int64(4)
        position: T.let = T.handle_add_byte_offset(scratch, P[F.AT_POSITION] + slots)
        expert: T.let = T.handle_add_byte_offset(scratch, P[F.AT_EXPERT] + slots)
        factors: T.let = T.handle_add_byte_offset(weights, slots)
        x_scale: T.let = T.handle_add_byte_offset(scratch, P[F.AT_H_SCALE])
        biased: T.let = T.Cast("int64", P[F.BIAS2_STRIDE] != T.int64(0))
        kind: T.let = x_code + T.int64(2) * (T.int64(1) - P[F.ON_INPUT]) + T.int64(4) * biased
        size: T.let = T.int64(2) * (x_code + T.int64(1))
        for p in range(T.min(P[F.GROUP2], P[F.PANELS2] - g * P[F.GROUP2])):
            at: T.let = g * P[F.GROUP2] + p
            column: T.let = at * T.int64(NR)
            w_scale: T.let = T.handle_add_byte_offset(plan, P[F.FROM_SCALE2] + column * T.int64(4))
            bias: T.let = T.handle_add_byte_offset(plan, P[F.FROM_BIAS2] + at * P[F.BIAS2_STRIDE] * T.int64(4))
            y: T.let = T.handle_add_byte_offset(
                scratch, P[F.AT_Y] + (g % P[F.RING_Y] * P[F.GROUP2] + p) * P[F.ROWS] * T.int64(NR * 4)
            )
            target: T.let = T.handle_add_byte_offset(out, (t0 * P[F.OUT_STRIDE] + column) * size)
            if P[F.HIDDEN] - column >= T.int64(NR):
                combine(
                    kind, y, position, expert, factors, x_scale, w_scale, bias, target, P[F.ROWS], n, P[F.TOP_K],
                    P[F.EXPERTS], P[F.PANELS2] * T.int64(NR), P[F.PANELS2] * P[F.BIAS2_STRIDE], P[F.OUT_STRIDE],
                )  # fmt: skip
            else:
                combine_tail(
                    kind, y, position, expert, factors, x_scale, w_scale, bias, target, P[F.ROWS], n, P[F.TOP_K],
                    P[F.EXPERTS], P[F.PANELS2] * T.int64(NR), P[F.PANELS2] * P[F.BIAS2_STRIDE],
                    P[F.HIDDEN] - column, P[F.OUT_STRIDE],
                )  # fmt: skip

    return combine_item
