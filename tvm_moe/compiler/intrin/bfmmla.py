"""AArch64 bfmmla: 2x2 f32 += 2 rows of 4 bf16 times 2 columns of 4 bf16.

TVM has no LLVM bfloat type: operands travel as uint16, and an always-inlined LLVM function casts them.
"""

from __future__ import annotations

from functools import cache

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

NAME = "moe_mma_bf16_2x2x4_bfmmla"
LANES = 2
FUNCTION = "moe_bfmmla"


@T.prim_func(s_tir=True)
def description(
    A: T.Buffer((2, 4), "uint16", offset_factor=1),
    B: T.Buffer((2, 4), "uint16", offset_factor=1),
    C: T.Buffer((2, 2), "float32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:2, 0:2], A[0:2, 0:4], B[0:2, 0:4])
        T.writes(C[0:2, 0:2])
        for i, j, k in T.grid(2, 2, 4):
            with T.sblock("update"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                T.reads(C[vi, vj], A[vi, vk], B[vj, vk])
                T.writes(C[vi, vj])
                C[vi, vj] = C[vi, vj] + T.reinterpret(
                    T.shift_left(T.cast(A[vi, vk], "uint32"), T.uint32(16)), dtype="float32"
                ) * T.reinterpret(T.shift_left(T.cast(B[vj, vk], "uint32"), T.uint32(16)), dtype="float32")


@T.prim_func(s_tir=True)
def implementation(
    A: T.Buffer((2, 4), "uint16", offset_factor=1),
    B: T.Buffer((2, 4), "uint16", offset_factor=1),
    C: T.Buffer((2, 2), "float32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:2, 0:2], A[0:2, 0:4], B[0:2, 0:4])
        T.writes(C[0:2, 0:2])
        C[0, T.ramp(T.int32(0), 1, 4)] = T.call_pure_extern(
            "float32x4",
            "moe_bfmmla",
            C.vload([0, 0], dtype="float32x4"),
            T.reinterpret(A.vload([0, 0], "uint16x8"), dtype="int32x4"),
            T.reinterpret(B.vload([0, 0], "uint16x8"), dtype="int32x4"),
        )


@cache
def tensor_intrin() -> str:
    TensorIntrin.register(NAME, description, implementation)
    return NAME


def llvm_ir(mcpu: str) -> str:
    return f"""
declare <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float>, <8 x bfloat>, <8 x bfloat>)
define <4 x float> @{FUNCTION}(<4 x float> %c, <4 x i32> %a, <4 x i32> %b) #0 {{
  %x = bitcast <4 x i32> %a to <8 x bfloat>
  %y = bitcast <4 x i32> %b to <8 x bfloat>
  %r = call <4 x float> @llvm.aarch64.neon.bfmmla(<4 x float> %c, <8 x bfloat> %x, <8 x bfloat> %y)
  ret <4 x float> %r
}}
attributes #0 = {{ alwaysinline "target-features"="{mcpu}" }}
"""
