"""The plan of a call: every size, split and scratch offset the compiled driver needs, as one array of int64.

Both halves read `Field`: the driver (compiler/driver) indexes the array with it, the runtime fills it in. Plain integers;
a plan depends only on sizes and the thread count, so a layer caches its plans and steady-state calls compute nothing.
"""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cached_property
from math import gcd

from .kernels import MicroKernel

L2_ROWS = 192  # rows of one expert that pass a weight panel before the next: their operands (0.4 MB at H 2048) fit L2
ITEMS_PER_THREAD = 24  # work items a stage should offer each thread, so that the last one to finish costs about 2 %
CHUNK_BYTES = 256 << 10  # K chunk of a panel that stays in L2 while the rows of a block pass
Y_RING_BYTES = 4 << 20  # down projection results waiting to be combined: what may stay in L3
Y_RING_THREAD_BYTES = 256 << 10  # a share of it for each thread: many have large caches, and more work under way
COMBINE_TOKENS = (
    64  # of a combine item, at least: threads share a group's combine, which would else be the last thing done
)
COMBINE_PARTS = 8  # items of a group at most
# A call of many tokens goes in parts whose intermediate stays in L3 (8 MB a thread), but with no fewer rows an expert than
# these, because each part reads the weights once more. It bounds the scratch memory, and costs nothing at 4096 tokens.
PART_BYTES = 8 << 20
PART_ROWS = 128
PREPARE_ROWS = 8  # rows per quantization item
PACK_UNITS = 64  # K groups of NR rows that packing converts before it transposes them: they stay in L1


class Field(IntEnum):
    """Index into the plan of a call. AT_* are byte offsets into the scratch buffer, FROM_* from the plan itself."""

    TOKENS = 0
    TOP_K = auto()
    X_ROWS = auto()  # of hidden_states
    ROW_SLOTS = auto()  # consecutive slots that a row of them serves: TOP_K where rows are tokens
    ROWS = auto()  # the slots, each expert's filled up to whole row groups
    EXPERTS = auto()
    HIDDEN = auto()
    INPUT = auto()  # columns of hidden_states: HIDDEN, but for a layer without gate/up projections
    LINEAR = auto()  # 1: such a layer, whose blocks' rows come straight from hidden_states
    THREADS = auto()
    X_STRIDE = auto()  # elements between the rows of hidden_states
    OUT_STRIDE = auto()
    K13 = auto()  # K groups of a gate/up panel
    K2 = auto()
    PANELS13 = auto()
    PANELS2 = auto()
    HALF = auto()  # intermediate columns a gate/up panel yields
    X_LD = auto()  # elements between the rows of the prepared hidden states
    H_LD = auto()
    ROW_BLOCK = auto()  # most rows of one expert in a work item
    GROUP13 = auto()  # panels of a gate/up work item
    GROUP2 = auto()
    ITEMS13 = auto()  # panel groups of the gate/up stage
    ITEMS2 = auto()
    CHUNK13 = auto()  # K groups of a pass over the rows
    CHUNK2 = auto()
    RING_H = auto()  # blocks whose intermediate may be incomplete at once (BF16 rows that need no rearranging: all)
    RING_Y = auto()  # panel groups whose down results may exist at once
    COMBINE_PARTS = auto()  # items that combine a panel group
    START_STRIDE = auto()  # accumulators between the start values of two panels (0: all panels share one)
    BIAS13_STRIDE = auto()
    BIAS2_STRIDE = auto()
    BLOCKS_MAX = auto()
    AT_X = auto()
    AT_X_SCALE = auto()
    AT_COUNT = auto()
    AT_ROWS = auto()
    AT_EXPERT = auto()
    AT_POSITION = auto()
    AT_IOTA = auto()
    AT_BLOCKS = auto()
    AT_SYNC = auto()
    AT_ACC = auto()
    AT_ROWS_IN = auto()  # a block's interleaved rows, of each thread
    AT_HF = auto()
    AT_H = auto()
    AT_H_SCALE = auto()
    AT_Y = auto()
    # The layer and the kind of call, see runtime.Layer.plan.
    SELF = auto()  # address of the plan
    FROM_W13 = auto()
    FROM_START13 = auto()
    FROM_SCALE13 = auto()
    FROM_BIAS13 = auto()
    FROM_W2 = auto()
    FROM_START2 = auto()
    FROM_SCALE2 = auto()
    FROM_BIAS2 = auto()
    ACTIVATION = auto()
    ALPHA = auto()  # bits of the f32
    LIMIT = auto()
    X_CODE = auto()  # 0 bf16, 1 f32
    IDS_WIDE = auto()  # 1: int64
    ON_INPUT = auto()  # 1: the router weight multiplies the input


class Matrix(IntEnum):
    """Index into the description of one matrix [N, K] to pack. AT_* are addresses relative to that of the description."""

    SOURCE = 0  # compiler/driver/pack.SOURCES
    ROW_STEP = auto()  # source rows between two columns of a part
    PART_STEP = auto()  # source rows between gate and up
    N_STRIDE = auto()  # elements between two source rows
    VALID = auto()  # columns of a part
    K = auto()
    HALF = auto()  # columns of a part in a panel
    PANELS = auto()
    GROUPS = auto()
    AT_FROM = auto()
    AT_PACKED = auto()
    AT_START = auto()
    AT_SCALE = auto()


@dataclass(frozen=True)
class LayerSizes:
    """One packed layer: experts, hidden size, intermediate size, whether w13 has a gate, which biases exist."""

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    bias13: bool = False
    bias2: bool = False
    linear: bool = False  # down projections alone: hidden_states are the intermediate

    @property
    def input(self) -> int:
        return self.intermediate if self.linear else self.hidden

    def half(self, kernel: MicroKernel) -> int:
        return kernel.NR // 2 if self.gated else kernel.NR

    def shape13(self, kernel: MicroKernel) -> tuple[int, int, int, int, int]:
        """Packed gate/up weights [E, panels, K groups, NR, group]."""
        if self.linear:
            return self.experts, 0, 0, kernel.NR, kernel.group
        panels = -(-self.intermediate // self.half(kernel))
        return self.experts, panels, kernel.k_groups(self.hidden), kernel.NR, kernel.group

    def shape2(self, kernel: MicroKernel) -> tuple[int, int, int, int, int]:
        groups = kernel.k_groups(self.intermediate)
        return self.experts, -(-self.hidden // kernel.NR), groups, kernel.NR, kernel.group

    def row_of_intermediate(self, kernel: MicroKernel) -> int:
        """Elements between its rows: whole panels of the gate/up stage, whole K steps of the down stage."""
        columns = self.intermediate if self.linear else self.shape13(kernel)[1] * self.half(kernel)
        return kernel.k_groups(columns) * kernel.group


@dataclass(frozen=True)
class Plan:
    """``parts``: the plans that serve instead, of consecutive tokens, and how many bytes further their arrays begin."""

    values: array[int]
    scratch_bytes: int
    parts: tuple[tuple[Plan, tuple[int, int, int, int]], ...] = ()

    @cached_property
    def pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.values.buffer_info()[0])

    def __getitem__(self, field: Field) -> int:
        return self.values[field]


def parts(
    kernel: MicroKernel, sizes: LayerSizes, tokens: int, top_k: int, threads: int, row_slots: int = 0
) -> list[tuple[int, int]]:
    """The ranges of tokens that are served one after the other, each with whole rows of hidden_states."""
    intermediate = tokens * top_k * sizes.row_of_intermediate(kernel) * kernel.activation_size
    cached = -(-intermediate // (PART_BYTES * threads))
    together = row_slots // gcd(row_slots, top_k) if row_slots else 1  # tokens
    units = tokens // together
    count = max(1, min(cached, units, tokens * top_k // (PART_ROWS * sizes.experts)))
    return [(units * i // count * together, units * (i + 1) // count * together) for i in range(count)]


def split(kernel: MicroKernel, sizes: LayerSizes, tokens: int, top_k: int, threads: int) -> dict[Field, int]:
    """How the work is cut: blocks of rows, groups of panels, chunks of K, rings of intermediates."""
    F, slots = Field, tokens * top_k
    _, panels13, k13, NR, _ = sizes.shape13(kernel)
    _, panels2, k2, _, _ = sizes.shape2(kernel)
    panels13 = panels13 or 1
    want = ITEMS_PER_THREAD * threads
    # Panels give parallelism first: smaller blocks read an expert's weights once more each.
    fewest = panels2 if sizes.linear else min(panels13, panels2)
    row_block = min(L2_ROWS, max(kernel.MR, slots * fewest // want))
    row_block = -(-row_block // kernel.MR) * kernel.MR
    likely_blocks = max(1, min(sizes.experts, slots), slots // row_block)
    group13 = min(panels13, max(1, likely_blocks * panels13 // want))
    # A group of the down stage is combined at once: its results of all slots should stay in L2.
    cached = max(1, (1 << 20) // max(1, slots * NR * 4))
    group2 = min(-(-panels2 // 4), cached, max(1, likely_blocks * panels2 // want))
    y_bytes = group2 * max(1, slots) * NR * 4
    items2 = -(-panels2 // group2)
    blocks_max = min(sizes.experts, slots) + slots // row_block + 1
    ring_bytes = max(Y_RING_BYTES, threads * Y_RING_THREAD_BYTES)
    return {
        F.ROW_BLOCK: row_block,
        F.GROUP13: group13,
        F.GROUP2: group2,
        F.ITEMS13: -(-panels13 // group13),
        F.ITEMS2: items2,
        F.CHUNK13: chunk(kernel, k13),
        F.CHUNK2: chunk(kernel, k2),
        F.RING_H: max(4, 4 * threads) if kernel.dtype == "int8" or kernel.row_group > 1 else blocks_max,
        F.RING_Y: min(items2, max(2, ring_bytes // y_bytes, -(-2 * threads // likely_blocks) + 1)),
        F.COMBINE_PARTS: max(1, min(COMBINE_PARTS, tokens // COMBINE_TOKENS)),
        F.BLOCKS_MAX: blocks_max,
    }


def chunk(kernel: MicroKernel, groups: int) -> int:
    """The chunk length, in K groups, that cuts a panel of ``groups`` into equal chunks of whole steps of the instruction."""
    steps = groups // kernel.depth
    most = max(1, CHUNK_BYTES // (kernel.NR * kernel.k_step * kernel.weight_size))
    return max(1, -(-steps // max(1, -(-steps // most)))) * kernel.depth


def make(
    kernel: MicroKernel, sizes: LayerSizes, tokens: int, top_k: int, threads: int, x_stride: int, out_stride: int,
    row_slots: int = 0,
) -> Plan:  # fmt: skip
    """The plan of one call; strides in elements. ``row_slots``: slots that a row of hidden_states serves (0: top_k)."""
    F, slots = Field, tokens * top_k
    _, panels13, k13, NR, group = sizes.shape13(kernel)
    _, panels2, k2, _, _ = sizes.shape2(kernel)
    half = sizes.half(kernel)
    paired = kernel.row_group > 1
    rows = slots + (kernel.row_group - 1) * min(sizes.experts, slots)
    row_slots = row_slots or max(1, top_k)
    x_rows = slots // row_slots
    v = split(kernel, sizes, tokens, top_k, threads)
    v |= {
        F.TOKENS: tokens, F.TOP_K: top_k, F.X_ROWS: x_rows, F.ROW_SLOTS: row_slots, F.ROWS: rows,
        F.EXPERTS: sizes.experts, F.HIDDEN: sizes.hidden, F.THREADS: threads,
        F.INPUT: sizes.input, F.LINEAR: int(sizes.linear),
        F.X_STRIDE: x_stride, F.OUT_STRIDE: out_stride, F.K13: k13, F.K2: k2,
        F.PANELS13: panels13, F.PANELS2: panels2, F.HALF: half, F.X_LD: k13 * group,
        F.H_LD: sizes.row_of_intermediate(kernel),
        F.START_STRIDE: NR if kernel.offset else 0,
        F.BIAS13_STRIDE: NR * sizes.bias13, F.BIAS2_STRIDE: NR * sizes.bias2,
    }  # fmt: skip
    blocks, h_ld = v[F.BLOCKS_MAX], v[F.H_LD]
    h_size = 4 if kernel.dtype == "int8" else 2 if paired else 0  # of the intermediate until its block is complete
    areas = {
        F.AT_X: x_rows * v[F.X_LD] * kernel.activation_size,
        F.AT_X_SCALE: x_rows * 4,
        F.AT_COUNT: (sizes.experts + 1) * 4,
        F.AT_ROWS: rows * 4,
        F.AT_EXPERT: slots * 4,
        F.AT_POSITION: slots * 4,
        F.AT_IOTA: v[F.ROW_BLOCK] * 4,
        F.AT_BLOCKS: 3 * blocks * 4,
        F.AT_SYNC: (SYNC_BLOCKS + 2 * blocks + 2 * v[F.ITEMS2]) * 8,
        F.AT_ACC: threads * v[F.ROW_BLOCK] * NR * 4,
        F.AT_ROWS_IN: threads * v[F.ROW_BLOCK] * max(v[F.X_LD], h_ld) * kernel.activation_size if paired else 0,
        F.AT_HF: min(v[F.RING_H], blocks) * v[F.ROW_BLOCK] * h_ld * h_size,
        F.AT_H: rows * h_ld * kernel.activation_size,
        F.AT_H_SCALE: rows * 4,
        F.AT_Y: v[F.RING_Y] * v[F.GROUP2] * max(1, rows) * NR * 4,
    }
    end = 0
    for area, size in areas.items():
        v[area] = end
        end += -(-size // 64) * 64
    return Plan(array("q", (v.get(f, 0) for f in F)), end)


# Layout of the synchronization area (int64 each; counters that threads fight over have a cache line of their own).
SYNC_TICKET, SYNC_PREPARED, SYNC_BLOCK_COUNT, SYNC_BLOCKS = 0, 8, 16, 24


def pack_row(kernel: MicroKernel) -> int:
    """Operands between two columns of the chunk: a cache line more than they hold, or all would share few cache sets."""
    return PACK_UNITS * kernel.group + 64 // kernel.weight_size


def pack_temp_bytes(kernel: MicroKernel) -> int:
    """Working memory packing needs per thread: the chunk; per column an int64 (its source row) and an int32 (its sum)."""
    return kernel.NR * (pack_row(kernel) * kernel.weight_size + 8 + 4)
