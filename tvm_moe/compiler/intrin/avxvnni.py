"""AVX-VNNI vpdpbusd on 256 bits: 8 int32 lanes += 4 products each of one broadcast u8 quad with 8 s8 quads; no saturation."""

from __future__ import annotations

from functools import cache

from .dot import quads

LANES = 8


@cache
def tensor_intrin() -> str:
    # LLVM has one name for both encodings; without AVX-512 it takes VEX.
    return quads("moe_dot_u8s8_8x4_avxvnni", LANES, ("uint8", "int8"), "llvm.x86.avx512.vpdpbusd.256")


def llvm_ir(mcpu: str) -> str:
    return ""
