"""Probe kernels: the most this CPU computes with a row's instruction, and the most it reads from memory."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import GlobalVar
from tvm.script import tirx as T

from ..kernels import MicroKernel
from . import intrin
from .driver.names import N
from .module import bare_tile

LANES, VECTORS = 16, 8  # a stream step: 8 vectors of 16 int32, 512 bytes, each with an accumulator of its own


def peak(kernel: MicroKernel) -> tirx.PrimFunc:
    """Every thread runs the full tile ``repeats`` times on one panel that stays in L1; each time continues the sums."""
    tile, MR, NR = N.tile["gate_up"], kernel.MR, kernel.NR
    thread = intrin.thread_state(kernel.intrinsic)

    @T.prim_func(s_tir=True)
    def peak(
        x: T.handle, w: T.handle, rows: T.handle, acc: T.handle, k_groups: T.int64, repeats: T.int64, threads: T.int64
    ) -> None:
        T.func_attr({"global_symbol": "peak"})
        T.evaluate(T.call_extern("int32", "moe_set_threads", T.Cast("int32", threads)))
        for th in T.parallel(threads):
            mine: T.let = T.handle_add_byte_offset(acc, th * T.int64(MR * NR * 4))
            thread.entered()
            for _ in range(repeats):
                if kernel.row_group > 1:
                    tile(x, w, rows, mine, mine, k_groups // T.int64(kernel.depth), T.int64(NR))
                else:
                    tile(
                        x, w, rows, mine, mine,
                        T.int64(MR), k_groups * T.int64(kernel.group), k_groups, T.int64(NR),
                    )  # fmt: skip
            thread.left()

    return intrin.with_llvm(peak, thread.llvm_ir)


def stream(kernel: MicroKernel) -> tirx.PrimFunc:
    """Every thread adds up a contiguous share of ``data``, int32 [threads, steps, 8, 16]; sums, int32 [threads, 16]."""

    @T.prim_func(s_tir=True)
    def stream(data: T.handle("int32"), sums: T.handle("int32"), steps: T.int64, threads: T.int64) -> None:
        T.func_attr({"global_symbol": "stream"})
        D = T.decl_buffer((threads, steps, VECTORS, LANES), "int32", data=data)
        S = T.decl_buffer((threads, LANES), "int32", data=sums)
        T.evaluate(T.call_extern("int32", "moe_set_threads", T.Cast("int32", threads)))
        for th in T.parallel(threads):
            total = T.alloc_buffer((VECTORS, LANES), "int32", scope="local")
            for v in T.unroll(VECTORS):
                for i in T.vectorized(LANES):
                    total[v, i] = 0
            for step in range(steps):
                for v in T.unroll(VECTORS):
                    for i in T.vectorized(LANES):
                        total[v, i] = total[v, i] + D[th, step, v, i]
            for v in T.unroll(VECTORS - 1):
                for i in T.vectorized(LANES):
                    total[0, i] = total[0, i] + total[v + 1, i]
            for i in T.vectorized(LANES):
                S[th, i] = total[0, i]

    return stream


def build_ir(kernel: MicroKernel, arch: str) -> tvm.IRModule:
    """The probes of one row of the table; needs the launcher as every module does."""
    return tvm.IRModule(
        {
            N.tile["gate_up"]: bare_tile(kernel, arch, kernel.MR),
            GlobalVar("peak"): peak(kernel),
            GlobalVar("stream"): stream(kernel),
        }
    )
