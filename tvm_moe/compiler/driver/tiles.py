"""Tiles: the slots of a call sorted by expert into blocks of rows."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ...plan import SYNC_BLOCK_COUNT, SYNC_BLOCKS
from .gemm import first_row
from .names import FIELDS, F


def tiles(kernel: MicroKernel, ids_dtype: str) -> tirx.PrimFunc:
    """Sort the slots by expert into blocks of rows, in linear time; ids outside [0, E) get position -1.

    An expert's rows are filled up to whole row groups, whose last one tiles compute without there being a slot for it.
    Also resets what the workers share: counters and a constant vector.
    """

    group = kernel.row_group

    @T.prim_func(private=True, s_tir=True)
    def tiles(
        ids: T.handle(ids_dtype), plan: T.handle("int64"), count: T.handle("int32"), rows: T.handle("int32"),
        expert: T.handle("int32"), position: T.handle("int32"), blocks: T.handle("int32"), sync: T.handle("int64"),
        iota: T.handle("int32"),
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        slots: T.let = P[F.TOKENS] * P[F.TOP_K]
        I = T.decl_buffer((slots,), ids_dtype, data=ids)
        C = T.decl_buffer((P[F.EXPERTS] + 1,), "int32", data=count)
        R = T.decl_buffer((P[F.ROWS],), "int32", data=rows)
        X = T.decl_buffer((slots,), "int32", data=expert)
        S = T.decl_buffer((slots,), "int32", data=position)
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        Y = T.decl_buffer((SYNC_BLOCKS + 2 * P[F.BLOCKS_MAX] + 2 * P[F.ITEMS2],), "int64", data=sync)
        A = T.decl_buffer((P[F.ROW_BLOCK],), "int32", data=iota)
        made = T.alloc_buffer((1,), "int64", scope="local")
        first = T.alloc_buffer((1,), "int64", scope="local")
        for e in range(P[F.EXPERTS] + 1):
            C[e] = 0
        for s in range(slots):
            e: T.let = T.Cast("int64", I[s])
            if e >= T.int64(0) and e < P[F.EXPERTS]:
                C[e + T.int64(1)] = C[e + T.int64(1)] + 1
        made[0] = T.int64(0)
        first[0] = T.int64(0)
        for e in range(P[F.EXPERTS]):
            n: T.let = T.Cast("int64", C[e + T.int64(1)])
            parts: T.let = (n + P[F.ROW_BLOCK] - T.int64(1)) // P[F.ROW_BLOCK]
            for i in range(parts):
                r0: T.let = first_row(kernel, n, i, parts)
                r1: T.let = first_row(kernel, n, i + T.int64(1), parts)
                B[made[0]] = T.Cast("int32", e)
                B[P[F.BLOCKS_MAX] + made[0]] = T.Cast("int32", first[0] + r0)
                B[2 * P[F.BLOCKS_MAX] + made[0]] = T.Cast("int32", r1 - r0)
                made[0] = made[0] + T.int64(1)
            C[e] = T.Cast("int32", first[0])
            first[0] = first[0] + (n + T.int64(group - 1)) // T.int64(group) * T.int64(group)
        if made[0] == T.int64(0):  # every slot skipped: one empty block, so that the output is still written
            B[0] = 0
            B[P[F.BLOCKS_MAX]] = 0
            B[2 * P[F.BLOCKS_MAX]] = 0
            made[0] = T.int64(1)
        for row in range(P[F.X_ROWS]):
            for j in range(P[F.ROW_SLOTS]):
                s: T.let = row * P[F.ROW_SLOTS] + j
                e: T.let = T.Cast("int64", I[s])
                if e >= T.int64(0) and e < P[F.EXPERTS]:
                    X[s] = T.Cast("int32", e)
                    S[s] = C[e]
                    R[T.Cast("int64", C[e])] = T.Cast("int32", row)
                    C[e] = C[e] + 1
                else:
                    S[s] = -1
        for i in range(P[F.ROW_BLOCK]):
            A[i] = T.Cast("int32", i)
        for i in range(SYNC_BLOCKS + 2 * P[F.BLOCKS_MAX] + 2 * P[F.ITEMS2]):
            Y[i] = T.int64(0)
        Y[SYNC_BLOCK_COUNT] = made[0]

    return tiles
