"""AVX512-BF16 vdpbf16ps: 16 f32 lanes += 2 products each of one broadcast bf16 pair with 16 bf16 pairs.

TVM has no LLVM bfloat type: operands travel as uint16, and an always-inlined LLVM function casts them.
"""

from __future__ import annotations

from functools import cache

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

NAME = "moe_dot_bf16_16x2_avx512bf16"
LANES = 16
FUNCTION = "moe_dpbf16ps_512"


@T.prim_func(s_tir=True)
def description(
    A: T.Buffer((2,), "uint16", offset_factor=1),
    rows: T.Buffer((1,), "int32", offset_factor=1),
    B: T.Buffer((16, 2), "uint16", offset_factor=1),
    C: T.Buffer((16,), "float32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:16], A[0:2], rows[0:1], B[0:16, 0:2])
        T.writes(C[0:16])
        for i in T.serial(0, 16):
            for k in T.serial(0, 2):
                with T.sblock("update"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    T.reads(C[vi], A[vk], rows[0], B[vi, vk])
                    T.writes(C[vi])
                    C[vi] = C[vi] + T.reinterpret(
                        T.shift_left(T.cast(A[vk], "uint32"), T.uint32(16)), dtype="float32"
                    ) * T.reinterpret(T.shift_left(T.cast(B[vi, vk], "uint32"), T.uint32(16)), dtype="float32")


@T.prim_func(s_tir=True)
def implementation(
    A: T.Buffer((2,), "uint16", offset_factor=1),
    rows: T.Buffer((1,), "int32", offset_factor=1),
    B: T.Buffer((16, 2), "uint16", offset_factor=1),
    C: T.Buffer((16,), "float32", offset_factor=1, scope="local"),
) -> None:
    with T.sblock("root"):
        T.reads(C[0:16], A[0:2], rows[0:1], B[0:16, 0:2])
        T.writes(C[0:16])
        C[T.ramp(T.int32(0), 1, 16)] = T.call_pure_extern(
            "float32x16",
            "moe_dpbf16ps_512",
            C.vload([0], dtype="float32x16"),
            T.broadcast(T.reinterpret(A.vload([0], "uint16x2"), dtype="int32"), 16),
            T.reinterpret(B.vload([0, 0], dtype="uint16x32"), dtype="int32x16"),
        )


@cache
def tensor_intrin() -> str:
    TensorIntrin.register(NAME, description, implementation)
    return NAME


def llvm_ir(mcpu: str) -> str:
    return f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define <16 x float> @{FUNCTION}(<16 x float> %c, <16 x i32> %a, <16 x i32> %b) #0 {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %c, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
attributes #0 = {{ alwaysinline "target-cpu"="{mcpu}" }}
"""
