"""AVX512-VNNI vpdpbusd: 16 int32 lanes += 4 products each of one broadcast u8 quad with 16 s8 quads; no saturation."""

from __future__ import annotations

from functools import cache

from .dot import quads

LANES = 16


@cache
def tensor_intrin() -> str:
    # This LLVM declares the operands as i8x64; TVM's own VNNI intrinsic (int32 operands) does not verify with it.
    return quads("moe_dot_u8s8_16x4_vnni", LANES, ("uint8", "int8"), "llvm.x86.avx512.vpdpbusd.512")


def llvm_ir(mcpu: str) -> str:
    return ""
