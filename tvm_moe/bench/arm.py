"""Executed instructions of AArch64 layers on any machine, beside those of vLLM's.

Times under emulation mean nothing; instructions are exact, but for a few dozen of the interpreter's. One call on one
thread, SiLU, no bias, weights and inputs random, routing fixed: so many rows for each expert.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..compiler import build
from ..emulation.counting import Guest
from ..kernels import MicroKernel, find_on
from ..modules import filename
from . import machine
from .options import Options

ARCH, LEVEL = "aarch64", "i8mm_bf16"
HIDDEN, INTERMEDIATE = 1024, 512
LOADS = {
    1: (0, 0, 1, 1, 0, 0, 0, 0),
    4: (3, 1, 0, 1, 1, 0, 0, 2),
    16: (8, 6, 2, 4, 3, 2, 5, 2),
    64: (13, 15, 12, 20, 19, 19, 14, 16),
}  # tokens -> rows of each of 8 experts, top-2
# vLLM 0.32's own AArch64 layer, from its released wheel, counted in the same way: all instructions, and matrix ones.
VLLM = {
    "int8": {1: (739_048, 393_216), 4: (1_843_358, 983_040), 16: (4_099_473, 2_162_688), 64: (12_569_163, 6_684_672)},
    "bf16": {1: (1_332_560, 786_432), 4: (3_313_953, 1_966_080), 16: (7_159_912, 4_325_376), 64: (21_804_336, 13_369_344)},
}  # fmt: skip


def run(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tvm_moe-arm-") as folder, Guest(TVM_MOE_MODULES=folder) as guest:
        for dtype in options.dtypes:
            kernel = find_on(ARCH, options.isa or LEVEL, dtype)
            say(f"building {kernel.key}")
            build.export(kernel, ARCH, Path(folder, filename(kernel, ARCH)))
            say(f"running {kernel.key} under qemu")
            rows += [row(kernel, tokens, executed) for tokens, executed in counted(kernel, guest)]
    return machine.stamp() | {"cells": [], "absent": [], "arm_instructions": rows}


def counted(kernel: MicroKernel, guest: Guest) -> list[tuple[int, dict[str, int]]]:
    """(tokens, executed instructions of each class) of each load."""
    sizes = {"experts": len(LOADS[1]), "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    return guest.regions("layer", dtype=kernel.dtype, isa=kernel.isa, loads=LOADS, **sizes)


def row(kernel: MicroKernel, tokens: int, executed: dict[str, int]) -> dict[str, Any]:
    everything, products = VLLM[kernel.dtype][tokens]
    return {
        "dtype": kernel.dtype, "kernel": kernel.name, "tokens": tokens, "rows": LOADS[tokens], "executed": executed,
        "needed_products": needed(kernel, tokens),
        "vllm": everything, "vllm_products": products, "ratio": executed["all"] / everything,
    }  # fmt: skip


def needed(kernel: MicroKernel, tokens: int) -> int:
    """Products of 2x2 blocks (smmla, bfmmla) without padding, half a block counted as half."""
    per_row = 3 * HIDDEN * INTERMEDIATE // (2 * 8 // kernel.weight_size)
    return sum(LOADS[tokens]) * per_row // 2
