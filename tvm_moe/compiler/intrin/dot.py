"""Tensor intrinsics from what differs between instructions: their shape, their operands' types, and the call itself.

A description, which TVM matches with the loops of a tile, and an implementation, which takes their place. ``multiply`` is
given the sums, a K group of a row (`dot`) or of two (`pairs`), and those of the columns, as vectors; it returns the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from ..compute import bf16_to_f32

Multiply = Callable[..., Any]


def product(a: tirx.PrimExpr, w: tirx.PrimExpr, integer: bool) -> tirx.PrimExpr:
    """As `compute` writes it."""
    return a.astype("int32") * w.astype("int32") if integer else bf16_to_f32(a) * bf16_to_f32(w)


def dot(name: str, lanes: int, group: int, types: tuple[str, str, str], multiply: Multiply) -> str:
    """``lanes`` sums += ``group`` products each, of one row's K group with those of as many columns.

    ``types``: of activation, weight and sum. Registers and returns ``name``. ``rows`` stands for the row index the block
    reads to gather; an intrinsic must declare every buffer its block reads.
    """
    activation, weight, accumulator = types
    integer = accumulator == "int32"

    @T.prim_func(s_tir=True)
    def description(a: T.handle, r: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (group,), activation, offset_factor=1)
        rows = T.match_buffer(r, (1,), "int32", offset_factor=1)
        B = T.match_buffer(b, (lanes, group), weight, offset_factor=1)
        C = T.match_buffer(c, (lanes,), accumulator, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:group], rows[0:1], B[0:lanes, 0:group])
            T.writes(C[0:lanes])
            for i in T.serial(0, lanes):
                for k in T.serial(0, group):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        T.reads(C[vi], A[vk], rows[0], B[vi, vk])
                        T.writes(C[vi])
                        C[vi] = C[vi] + product(A[vk], B[vi, vk], integer)

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, r: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (group,), activation, offset_factor=1)
        rows = T.match_buffer(r, (1,), "int32", offset_factor=1)
        B = T.match_buffer(b, (lanes, group), weight, offset_factor=1)
        C = T.match_buffer(c, (lanes,), accumulator, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:group], rows[0:1], B[0:lanes, 0:group])
            T.writes(C[0:lanes])
            C[T.ramp(T.int32(0), 1, lanes)] = multiply(
                C.vload([0], f"{accumulator}x{lanes}"),
                A.vload([0], f"{activation}x{group}"),
                B.vload([0, 0], f"{weight}x{lanes * group}"),
            )

    TensorIntrin.register(name, description, implementation)
    return name


def quads(name: str, lanes: int, types: tuple[str, str], instruction: str) -> str:
    """`dot` of bytes by one LLVM intrinsic: a row's quad meets every column's; ``types``: of activation and weight."""

    def multiply(sums: tirx.PrimExpr, quad: tirx.PrimExpr, columns: tirx.PrimExpr) -> tirx.PrimExpr:
        same = tirx.reinterpret(f"{types[0]}x{4 * lanes}", tirx.Broadcast(tirx.reinterpret("int32", quad), lanes))
        return tirx.call_llvm_pure_intrin(f"int32x{lanes}", instruction, sums, same, columns)

    return dot(name, lanes, 4, (*types, "int32"), multiply)


ALONE = "_alone"  # suffix of the intrinsic that takes one row twice


def pairs(name: str, group: int, types: tuple[str, str], multiply: Multiply) -> str:
    """2x2 sums += ``group`` products each, of two interleaved rows with two columns; ``types``: of operands and sums.

    Registers and returns ``name``, and ``name + ALONE``.
    """
    pair(name, 2, group, types, multiply)
    pair(name + ALONE, 1, group, types, multiply)
    return name


def pair(name: str, rows: int, group: int, types: tuple[str, str], multiply: Multiply) -> None:
    operand, accumulator = types
    integer = accumulator == "int32"

    def both(loaded: tirx.PrimExpr) -> tirx.PrimExpr:
        if rows == 2:
            return loaded
        return tirx.reinterpret(f"{operand}x{2 * group}", tirx.Broadcast(tirx.reinterpret("int64", loaded), 2))

    @T.prim_func(s_tir=True)
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (rows, group), operand, offset_factor=1)
        B = T.match_buffer(b, (2, group), operand, offset_factor=1)
        C = T.match_buffer(c, (2, 2), accumulator, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:2, 0:2], A[0:rows, 0:group], B[0:2, 0:group])
            T.writes(C[0:2, 0:2])
            for i, j, k in T.grid(2, 2, group):
                with T.sblock("update"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    T.reads(C[vi, vj], A[vi * (rows - 1), vk], B[vj, vk])
                    T.writes(C[vi, vj])
                    C[vi, vj] = C[vi, vj] + product(A[vi * (rows - 1), vk], B[vj, vk], integer)

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (rows, group), operand, offset_factor=1)
        B = T.match_buffer(b, (2, group), operand, offset_factor=1)
        C = T.match_buffer(c, (2, 2), accumulator, offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:2, 0:2], A[0:rows, 0:group], B[0:2, 0:group])
            T.writes(C[0:2, 0:2])
            C[0, T.ramp(T.int32(0), 1, 4)] = multiply(
                C.vload([0, 0], f"{accumulator}x4"),
                both(A.vload([0, 0], f"{operand}x{rows * group}")),
                B.vload([0, 0], f"{operand}x{2 * group}"),
            )

    TensorIntrin.register(name, description, implementation)
