"""AArch64 sdot: 4 int32 lanes += 4 products each of one broadcast s8 quad with 4 s8 quads; no saturation."""

from __future__ import annotations

from functools import cache

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

NAME = "moe_dot_s8s8_4x4_sdot"
LANES = 4


@T.prim_func(s_tir=True)
def description(
    A: T.Buffer((4,), "int8", offset_factor=1),
    rows: T.Buffer((1,), "int32", offset_factor=1),
    B: T.Buffer((4, 4), "int8", offset_factor=1),
    C: T.Buffer((4,), "int32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:4], A[0:4], rows[0:1], B[0:4, 0:4])
        T.writes(C[0:4])
        for i in T.serial(0, 4):
            for k in T.serial(0, 4):
                with T.sblock("update"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    T.reads(C[vi], A[vk], rows[0], B[vi, vk])
                    T.writes(C[vi])
                    C[vi] = C[vi] + T.cast(A[vk], "int32") * T.cast(B[vi, vk], "int32")


@T.prim_func(s_tir=True)
def implementation(
    A: T.Buffer((4,), "int8", offset_factor=1),
    rows: T.Buffer((1,), "int32", offset_factor=1),
    B: T.Buffer((4, 4), "int8", offset_factor=1),
    C: T.Buffer((4,), "int32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:4], A[0:4], rows[0:1], B[0:4, 0:4])
        T.writes(C[0:4])
        C[T.ramp(T.int32(0), 1, 4)] = T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.aarch64.neon.sdot.v4i32.v16i8"),
            C.vload([0], dtype="int32x4"),
            T.reinterpret(T.broadcast(T.reinterpret(A.vload([0], "int8x4"), dtype="int32"), 4), dtype="int8x16"),
            B.vload([0, 0], dtype="int8x16"),
            dtype="int32x4",
        )


@cache
def tensor_intrin() -> str:
    TensorIntrin.register(NAME, description, implementation)
    return NAME


def llvm_ir(mcpu: str) -> str:
    return ""
