"""What a thread does: take tickets until none are left, and the exported entry point."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ...plan import PREPARE_ROWS, SYNC_BLOCK_COUNT, SYNC_BLOCKS, SYNC_PREPARED, SYNC_TICKET
from .. import intrin
from .names import FIELDS, F, N


def worker(kernel: MicroKernel) -> tirx.PrimFunc:
    thread = intrin.thread_state(kernel.intrinsic)
    prepare_item, gate_up_item, down_item = N.prepare_item, N.gate_up_item, N.down_item
    gather_item = N.gather_item
    ring = F.AT_HF if kernel.dtype == "int8" or kernel.row_group > 1 else F.AT_H
    finish_block, combine_item = N.finish_block, N.combine_item

    @T.prim_func(private=True, s_tir=True)
    def worker(
        th: T.int64, x: T.handle, out: T.handle, weights: T.handle,
        scratch: T.handle, plan: T.handle("int64"), sync: T.handle("int64"), blocks: T.handle("int32"),
    ) -> None:  # fmt: skip
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        x_code: T.let = P[F.X_CODE]
        Y = T.decl_buffer((SYNC_BLOCKS + 2 * P[F.BLOCKS_MAX] + 2 * P[F.ITEMS2],), "int64", data=sync)
        B = T.decl_buffer((3 * P[F.BLOCKS_MAX],), "int32", data=blocks)
        n_blocks: T.let = Y[SYNC_BLOCK_COUNT]
        prepares: T.let = T.if_then_else(
            P[F.LINEAR] == T.int64(0), (P[F.X_ROWS] + T.int64(PREPARE_ROWS - 1)) // T.int64(PREPARE_ROWS), T.int64(0)
        )
        down_from: T.let = prepares + n_blocks * P[F.ITEMS13]
        # The down stage goes in rounds: a panel group's blocks, and the combine of the group `lag` rounds before. By then all
        # its blocks are done or under way, so that few threads wait; the ring must have room for that many groups.
        parts: T.let = P[F.COMBINE_PARTS]
        round_items: T.let = n_blocks + parts
        lag: T.let = T.min(P[F.RING_Y] - T.int64(1), (T.int64(2) * P[F.THREADS] + n_blocks - T.int64(1)) // n_blocks)
        end: T.let = down_from + round_items * (P[F.ITEMS2] + lag)
        # Per block: finished gate/up items, then "intermediate ready"; per panel group: finished blocks, then combine items.
        ready: T.let = SYNC_BLOCKS + P[F.BLOCKS_MAX]
        group_count: T.let = SYNC_BLOCKS + 2 * P[F.BLOCKS_MAX]
        combined: T.let = group_count + P[F.ITEMS2]
        ticket = T.alloc_buffer((2,), "int64", scope="local")  # the item at hand, and the one after it
        done = T.alloc_buffer((1,), "int64", scope="local")
        next_at = T.alloc_buffer((1,), "int64", scope="local")
        last = T.alloc_buffer((1,), "int64", scope="local")  # the block whose rows this thread has rearranged
        last[0] = T.int64(-1)
        row_ids: T.let = T.handle_add_byte_offset(scratch, P[F.AT_ROWS])
        thread.entered()
        ticket[1] = T.call_extern("int64", "moe_add", T.address_of(Y[SYNC_TICKET]), T.int64(1)) - T.int64(1)
        while ticket[1] < end:
            ticket[0] = ticket[1]
            ticket[1] = T.call_extern("int64", "moe_add", T.address_of(Y[SYNC_TICKET]), T.int64(1)) - T.int64(1)
            if ticket[0] < prepares:
                prepare_item(ticket[0], x, x_code, weights, plan, scratch, T.handle_add_byte_offset(scratch, P[F.AT_X]))
                T.evaluate(T.call_extern("int64", "moe_add", T.address_of(Y[SYNC_PREPARED]), T.int64(1)))
            elif ticket[0] < down_from:
                b: T.let = (ticket[0] - prepares) // P[F.ITEMS13]
                g: T.let = (ticket[0] - prepares) % P[F.ITEMS13]
                next_b: T.let = (T.min(ticket[1], down_from - T.int64(1)) - prepares) // P[F.ITEMS13]
                next_g: T.let = (T.min(ticket[1], down_from - T.int64(1)) - prepares) % P[F.ITEMS13]
                next_at[0] = T.Cast("int64", B[next_b]) * P[F.PANELS13] + next_g * P[F.GROUP13]
                T.evaluate(T.call_extern("int32", "moe_wait", T.address_of(Y[SYNC_PREPARED]), prepares))
                if b >= P[F.RING_H]:
                    T.evaluate(T.call_extern("int32", "moe_wait", T.address_of(Y[ready + b - P[F.RING_H]]), T.int64(1)))
                if P[F.LINEAR] != T.int64(0):
                    gather_item(b, x, x_code, plan, scratch, blocks, T.handle_add_byte_offset(scratch, P[ring]))
                else:
                    new: T.let = T.Cast("int64", last[0] != b)
                    gate_up_item(th, b, g, next_at[0], new, plan, scratch, blocks, row_ids)
                    last[0] = b
                done[0] = T.call_extern("int64", "moe_add", T.address_of(Y[SYNC_BLOCKS + b]), T.int64(1))
                if done[0] == P[F.ITEMS13]:
                    finish_block(th, b, plan, scratch, blocks)
                    last[0] = T.int64(-1)
                    T.evaluate(T.call_extern("int64", "moe_add", T.address_of(Y[ready + b]), T.int64(1)))
            else:
                j: T.let = (ticket[0] - down_from) // round_items
                b: T.let = (ticket[0] - down_from) % round_items
                if b < n_blocks:
                    if j < P[F.ITEMS2]:
                        next_j: T.let = (T.min(ticket[1], end - T.int64(1)) - down_from) // round_items
                        next_b: T.let = (T.min(ticket[1], end - T.int64(1)) - down_from) % round_items
                        next_at[0] = (
                            T.Cast("int64", B[T.min(next_b, n_blocks - T.int64(1))]) * P[F.PANELS2]
                            + T.min(next_j, P[F.ITEMS2] - T.int64(1)) * P[F.GROUP2]
                        )
                        T.evaluate(T.call_extern("int32", "moe_wait", T.address_of(Y[ready + b]), T.int64(1)))
                        if j >= P[F.RING_Y]:
                            T.evaluate(
                                T.call_extern("int32", "moe_wait", T.address_of(Y[combined + j - P[F.RING_Y]]), parts)
                            )
                        next_first: T.let = T.Cast("int64", B[P[F.BLOCKS_MAX] + T.min(next_b, n_blocks - T.int64(1))])
                        down_item(j, b, next_at[0], next_first, plan, scratch, blocks)
                        T.evaluate(T.call_extern("int64", "moe_add", T.address_of(Y[group_count + j]), T.int64(1)))
                elif j >= lag:
                    T.evaluate(T.call_extern("int32", "moe_wait", T.address_of(Y[group_count + j - lag]), n_blocks))
                    combine_item(j - lag, b - n_blocks, plan, scratch, weights, out, x_code)
                    T.evaluate(T.call_extern("int64", "moe_add", T.address_of(Y[combined + j - lag]), T.int64(1)))
        thread.left()

    return intrin.with_llvm(worker, thread.llvm_ir)


def entry() -> tirx.PrimFunc:
    """The exported function: one call a layer. All but the plan are addresses; few arguments, because each costs time."""
    worker, tiles_int32, tiles_int64 = N.worker, N.tiles["int32"], N.tiles["int64"]

    @T.prim_func(s_tir=True)
    def moe(
        plan: T.handle("int64"), x_at: T.int64, out_at: T.int64, weights_at: T.int64, ids_at: T.int64,
        scratch_at: T.int64,
    ) -> None:  # fmt: skip
        T.func_attr({"global_symbol": "moe", "tirx.noalias": True})
        P = T.decl_buffer((FIELDS,), "int64", data=plan)
        x: T.let = T.handle_add_byte_offset(plan, x_at - P[F.SELF])
        out: T.let = T.handle_add_byte_offset(plan, out_at - P[F.SELF])
        weights: T.let = T.handle_add_byte_offset(plan, weights_at - P[F.SELF])
        ids: T.let = T.handle_add_byte_offset(plan, ids_at - P[F.SELF])
        scratch: T.let = T.handle_add_byte_offset(plan, scratch_at - P[F.SELF])
        blocks: T.let = T.handle_add_byte_offset(scratch, P[F.AT_BLOCKS])
        sync: T.let = T.handle_add_byte_offset(scratch, P[F.AT_SYNC])
        count: T.let = T.handle_add_byte_offset(scratch, P[F.AT_COUNT])
        rows: T.let = T.handle_add_byte_offset(scratch, P[F.AT_ROWS])
        expert: T.let = T.handle_add_byte_offset(scratch, P[F.AT_EXPERT])
        position: T.let = T.handle_add_byte_offset(scratch, P[F.AT_POSITION])
        iota: T.let = T.handle_add_byte_offset(scratch, P[F.AT_IOTA])
        if P[F.IDS_WIDE] != T.int64(0):
            tiles_int64(ids, plan, count, rows, expert, position, blocks, sync, iota)
        else:
            tiles_int32(ids, plan, count, rows, expert, position, blocks, sync, iota)
        T.evaluate(T.call_extern("int32", "moe_set_threads", T.Cast("int32", P[F.THREADS])))
        for th in T.parallel(P[F.THREADS]):
            worker(th, x, out, weights, scratch, plan, sync, blocks)

    return moe
