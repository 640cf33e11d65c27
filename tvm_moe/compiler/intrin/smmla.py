"""AArch64 smmla: 2x2 int32 += 2 rows of 8 s8 times 2 columns of 8 s8; no saturation."""

from __future__ import annotations

from functools import cache

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

NAME = "moe_mma_s8s8_2x2x8_smmla"
LANES = 2


@T.prim_func(s_tir=True)
def description(
    A: T.Buffer((2, 8), "int8", offset_factor=1),
    B: T.Buffer((2, 8), "int8", offset_factor=1),
    C: T.Buffer((2, 2), "int32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:2, 0:2], A[0:2, 0:8], B[0:2, 0:8])
        T.writes(C[0:2, 0:2])
        for i, j, k in T.grid(2, 2, 8):
            with T.sblock("update"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                T.reads(C[vi, vj], A[vi, vk], B[vj, vk])
                T.writes(C[vi, vj])
                C[vi, vj] = C[vi, vj] + T.cast(A[vi, vk], "int32") * T.cast(B[vj, vk], "int32")


@T.prim_func(s_tir=True)
def implementation(
    A: T.Buffer((2, 8), "int8", offset_factor=1),
    B: T.Buffer((2, 8), "int8", offset_factor=1),
    C: T.Buffer((2, 2), "int32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:2, 0:2], A[0:2, 0:8], B[0:2, 0:8])
        T.writes(C[0:2, 0:2])
        C[0, T.ramp(T.int32(0), 1, 4)] = T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.aarch64.neon.smmla.v4i32.v16i8"),
            C.vload([0, 0], "int32x4"),
            A.vload([0, 0], "int8x16"),
            B.vload([0, 0], "int8x16"),
            dtype="int32x4",
        )


@cache
def tensor_intrin() -> str:
    TensorIntrin.register(NAME, description, implementation)
    return NAME


def llvm_ir(mcpu: str) -> str:
    return ""
