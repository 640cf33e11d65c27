"""AVX512-VNNI vpdpbusd: 16 int32 lanes += 4 products each of one broadcast u8 quad with 16 s8 quads; no saturation."""

from __future__ import annotations

from functools import cache

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

NAME = "moe_dot_u8s8_16x4_vnni"
LANES = 16

# `rows` stands for the row index the block reads to gather; an intrinsic must declare every buffer its block reads.


@T.prim_func(s_tir=True)
def description(
    A: T.Buffer((4,), "uint8", offset_factor=1),
    rows: T.Buffer((1,), "int32", offset_factor=1),
    B: T.Buffer((16, 4), "int8", offset_factor=1),
    C: T.Buffer((16,), "int32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:16], A[0:4], rows[0:1], B[0:16, 0:4])
        T.writes(C[0:16])
        for i in T.serial(0, 16):
            for k in T.serial(0, 4):
                with T.sblock("update"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    T.reads(C[vi], A[vk], rows[0], B[vi, vk])
                    T.writes(C[vi])
                    C[vi] = C[vi] + T.cast(A[vk], "int32") * T.cast(B[vi, vk], "int32")


# This LLVM declares the operands as i8x64; TVM's own VNNI intrinsic (int32 operands) does not verify with it.
@T.prim_func(s_tir=True)
def implementation(
    A: T.Buffer((4,), "uint8", offset_factor=1),
    rows: T.Buffer((1,), "int32", offset_factor=1),
    B: T.Buffer((16, 4), "int8", offset_factor=1),
    C: T.Buffer((16,), "int32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:16], A[0:4], rows[0:1], B[0:16, 0:4])
        T.writes(C[0:16])
        C[T.ramp(T.int32(0), 1, 16)] = T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.x86.avx512.vpdpbusd.512"),
            C.vload([0], dtype="int32x16"),
            T.reinterpret(T.broadcast(T.reinterpret(A.vload([0], "uint8x4"), dtype="int32"), 16), dtype="uint8x64"),
            B.vload([0, 0], dtype="int8x64"),
            dtype="int32x16",
        )


@cache
def tensor_intrin() -> str:
    TensorIntrin.register(NAME, description, implementation)
    return NAME


def llvm_ir(mcpu: str) -> str:
    return ""
