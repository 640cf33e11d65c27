"""AMX-BF16 tdpbf16ps: 16x16 f32 sums += 32 products each of a row's bf16 with a column's.

Even and odd products of a step are summed apart, in order, then together, then on top of the sum: not in the order of
vdpbf16ps, so that all row counts of a layer must take this instruction.
"""

from __future__ import annotations

from functools import cache

from . import tile_registers, tiles

LANES = tile_registers.ROWS
THREAD = tile_registers.THREAD


@cache
def tensor_intrin() -> str:
    return tiles.register("moe_tiles_bf16", "tdpbf16ps", ("uint16", "uint16", "float32"))


def llvm_ir(mcpu: str) -> str:
    return tile_registers.llvm_ir(mcpu)
