"""What a tuning task measures: the tile in the very panel loop that serves, over weights too many for any cache."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import GlobalVar
from tvm.script import tirx as T

from ..kernels import MicroKernel, find
from ..plan import chunk
from ..tuning import Decisions
from . import intrin
from .driver.names import N
from .module import multiplying

WEIGHT_BYTES = 256 << 20  # of one pass over the weights
TILES = 8  # of a block of full tiles
ROW_SETS = 64  # of random row ids, taken in turn


@dataclass(frozen=True)
class Task:
    """A tile of ``rows`` rows of a kernel, with a K of H (stage gate_up) or I (down)."""

    isa: str
    dtype: str
    stage: str
    K: int
    rows: int

    @property
    def kernel(self) -> MicroKernel:
        return find(self.isa, self.dtype)

    @property
    def serving(self) -> MicroKernel:
        """The row whose tile this is."""
        return self.kernel.serving(self.rows)

    @property
    def label(self) -> str:
        return f"{self.isa} {self.dtype} {self.stage} K={self.K} rows={self.rows}"

    @property
    def groups(self) -> int:
        return self.kernel.k_groups(self.K)

    @property
    def block_rows(self) -> int:
        """Rows of a block that `panel` cuts into tiles of ``rows``: a lone one that waits for memory, two, or many."""
        MR = self.kernel.MR
        return self.rows * (1 if self.rows <= MR // 2 else TILES if self.rows == MR else 2)

    @property
    def panel_bytes(self) -> int:
        return self.groups * self.kernel.NR * self.kernel.group * self.kernel.weight_size

    @property
    def panels(self) -> int:
        return max(2, WEIGHT_BYTES // self.panel_bytes)

    def bytes_of(self, panels: int) -> dict[str, int]:
        """Of the arrays of `entry` in order, one thread, all row ids 0."""
        kernel, rows = self.kernel, self.block_rows + self.kernel.row_group
        return {
            "x": rows * self.groups * kernel.group * kernel.activation_size, "w": panels * self.panel_bytes,
            "rows": ROW_SETS * self.block_rows * 4, "start": kernel.NR * 4, "acc": 2 * rows * kernel.NR * 4,
        }  # fmt: skip


def buckets(kernel: MicroKernel) -> tuple[int, ...]:
    """Row counts that are tuned; others take the nearest: 1, 2, 4, ... and MR."""
    powers = {1 << i for i in range(kernel.MR.bit_length())}
    return tuple(r for r in kernel.rows if r in powers or r == kernel.MR)


def build_ir(task: Task, arch: str, decisions: Decisions) -> tvm.IRModule:
    functions = multiplying(task.serving, arch, "gate_up", {task.rows: decisions})
    return tvm.IRModule(functions | {GlobalVar("stage"): entry(task)})


def entry(task: Task) -> tirx.PrimFunc:
    """One pass: every panel once, each with ``block_rows`` random rows; threads take contiguous shares as items do."""
    kernel, panel = task.kernel, N.panel["gate_up"]
    groups, n, size = task.groups, task.block_rows, task.panel_bytes
    piece = chunk(kernel, groups)
    acc_bytes = n * kernel.NR * 4
    thread = intrin.thread_state(task.serving.intrinsic)

    @T.prim_func(s_tir=True)
    def stage(
        x: T.handle, w: T.handle, rows: T.handle, start: T.handle, acc: T.handle, panels: T.int64, threads: T.int64
    ) -> None:
        T.func_attr({"global_symbol": "stage"})
        T.evaluate(T.call_extern("int32", "moe_set_threads", T.Cast("int32", threads)))
        for th in T.parallel(threads):
            thread.entered()
            for q in range((th + T.int64(1)) * panels // threads - th * panels // threads):
                p: T.let = th * panels // threads + q
                panel(
                    T.int64(n), x, T.int64(groups * kernel.group),
                    T.handle_add_byte_offset(rows, p % T.int64(ROW_SETS) * T.int64(n * 4)),
                    T.handle_add_byte_offset(w, p * T.int64(size)), start,
                    # In turns in two places: LLVM would leave out all but the last of the panels it sees through (small K).
                    T.handle_add_byte_offset(acc, (th * T.int64(2) + p % T.int64(2)) * T.int64(acc_bytes)),
                    T.int64(groups), T.int64(piece), T.int64(size), T.int64(0), T.int64(0),
                )  # fmt: skip
            thread.left()

    return intrin.with_llvm(stage, thread.llvm_ir)
