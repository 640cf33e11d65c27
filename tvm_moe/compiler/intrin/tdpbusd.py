"""AMX-INT8 tdpbusd: 16x16 int32 sums += 64 products each of a row's u8 with a column's s8; no saturation."""

from __future__ import annotations

from functools import cache

from . import tile_registers, tiles

LANES = tile_registers.ROWS
THREAD = tile_registers.THREAD


@cache
def tensor_intrin() -> str:
    return tiles.register("moe_tiles_u8s8", "tdpbusd", ("uint8", "int8", "int32"))


def llvm_ir(mcpu: str) -> str:
    return tile_registers.llvm_ir(mcpu)
