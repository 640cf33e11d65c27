"""AMX as tensor intrinsics: running sums into tiles, the products of a K step, sums out of tiles.

Tiles 0 to 3 hold sums, 2x2 of them for 32 rows and 32 columns or 1x4 for 16 rows and 64 columns, the other four a step's
rows and columns. (A step of r x c tiles of sums takes r + c loads for r * c products, and min(r, c) + 1 more tiles: 2x2 has
the fewest loads a product.) What is described is whole tiles of 16 rows, of which a row alone is every one (a stride of 0);
of a tile that was shaped for fewer, instructions read, multiply and write those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from .dot import product
from .tile_registers import LOAD, ROW_BYTES, ROWS, SAVE, TILES, move

SUMS = 4  # tiles
SCOPE = "amx.tmm"
START, ZERO, STORE = "_start", "_zero", "_store"  # suffixes of the intrinsics beside that of a K step


@dataclass(frozen=True)
class Shape:
    """What a step multiplies: ``rows`` of ``activation`` with a block of columns of ``weight``."""

    rows: int
    activation: str
    weight: str
    accumulator: str

    @property
    def suffix(self) -> str:
        return f"_{self.rows}"

    @property
    def alone(self) -> bool:
        return self.rows == 1

    @property
    def high(self) -> int:
        """Tiles of rows."""
        return -(-self.rows // ROWS)

    @property
    def columns(self) -> int:
        return SUMS // self.high * ROWS

    @property
    def size(self) -> int:
        return tvm.DataType(self.activation).itemsize

    def sums(self) -> Iterator[tuple[int, int, int]]:
        """Of each tile of sums: its number, and where it stands among the others, down and across."""
        wide = SUMS // self.high
        return ((tile, tile // wide, tile % wide) for tile in range(SUMS))


def columns(rows: int) -> int:
    """Columns whose sums a tile of so many rows keeps at once."""
    return Shape(rows, "", "", "").columns


def move_sums(function: str, shape: Shape, buffer: tirx.Buffer, stride: tirx.PrimExpr) -> None:
    for tile, i, j in shape.sums():
        move(function, tile, buffer, (i * ROWS, j * ROWS), 0 if shape.alone else stride * 4)


def multiply(instruction: str, shape: Shape, A: tirx.Buffer, B: tirx.Buffer, stride: tirx.PrimExpr) -> None:
    """Each load before the first product that needs it; columns take turns in the tiles that sums and rows leave."""
    rows, columns = SUMS, SUMS + shape.high
    for tile, i, j in shape.sums():
        left, right = rows + i, columns + j % (TILES - columns)
        if j == 0:
            move(LOAD, left, A, (i * ROWS, 0), 0 if shape.alone else ROW_BYTES)
        if i == 0:
            move(LOAD, right, B, (0, j * ROWS, 0), stride * shape.size)
        numbers = (tirx.const(number, "uint8") for number in (tile, left, right))
        T.evaluate(tirx.call_llvm_intrin("int32", f"llvm.x86.{instruction}", *numbers))


def register(name: str, instruction: str, types: tuple[str, str, str]) -> str:
    """Register and return ``name``, for each row count that a tile can have; ``types``: of row, column and sum."""
    for rows in (1, ROWS, 2 * ROWS):
        shape = Shape(rows, *types)
        register_step(name + shape.suffix, instruction, shape)
        register_start(name + shape.suffix, shape)
        register_store(name + shape.suffix + STORE, shape)
    return name


def register_step(name: str, instruction: str, shape: Shape) -> None:
    """``ROW_BYTES`` of each row and column: their products on top of the sums."""
    rows, block, depth, own = shape.rows, shape.columns, ROW_BYTES // 4, int(not shape.alone)
    held, group, K = shape.high * ROWS, 4 // shape.size, ROW_BYTES // shape.size
    activation, weight, accumulator = shape.activation, shape.weight, shape.accumulator
    integer = accumulator == "int32"

    @T.prim_func(s_tir=True)
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (rows, K), activation, offset_factor=1)
        B = T.match_buffer(b, (depth, block, group), weight, offset_factor=1)
        C = T.match_buffer(c, (held, block), accumulator, offset_factor=1, scope=SCOPE)
        with T.sblock("root"):
            T.reads(C[0:held, 0:block], A[0:rows, 0:K], B[0:depth, 0:block, 0:group])
            T.writes(C[0:held, 0:block])
            for i, j, k in T.grid(held, block, K):
                with T.sblock("update"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    C[vi, vj] = C[vi, vj] + product(A[vi * own, vk], B[vk // group, vj, vk % group], integer)

    @T.prim_func(s_tir=True)
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        stride = T.int64()
        A = T.match_buffer(a, (rows, K), activation, offset_factor=1)
        B = T.match_buffer(b, (depth, block, group), weight, offset_factor=1, strides=[stride, group, 1])
        C = T.match_buffer(c, (held, block), accumulator, offset_factor=1, scope=SCOPE)
        with T.sblock("root"):
            T.reads(C[0:held, 0:block], A[0:rows, 0:K], B[0:depth, 0:block, 0:group])
            T.writes(C[0:held, 0:block])
            multiply(instruction, shape, A, B, stride)

    TensorIntrin.register(name, description, implementation)


def register_start(name: str, shape: Shape) -> None:
    """``name``_start loads the running sums; the products' own start from zero, on top of them, is nothing to do (_zero)."""
    rows, block, held, own = shape.rows, shape.columns, shape.high * ROWS, int(not shape.alone)
    accumulator = shape.accumulator

    @T.prim_func(s_tir=True)
    def description(s: T.handle, c: T.handle) -> None:
        stride = T.int64()
        S = T.match_buffer(s, (rows, block), accumulator, offset_factor=1, strides=[stride, 1])
        C = T.match_buffer(c, (held, block), accumulator, offset_factor=1, scope=SCOPE)
        with T.sblock("root"):
            T.reads(S[0:rows, 0:block])
            T.writes(C[0:held, 0:block])
            for i, j in T.grid(held, block):
                with T.sblock("start"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = S[vi * own, vj]

    @T.prim_func(s_tir=True)
    def implementation(s: T.handle, c: T.handle) -> None:
        stride = T.int64()
        S = T.match_buffer(s, (rows, block), accumulator, offset_factor=1, strides=[stride, 1])
        C = T.match_buffer(c, (held, block), accumulator, offset_factor=1, scope=SCOPE)
        with T.sblock("root"):
            T.reads(S[0:rows, 0:block])
            T.writes(C[0:held, 0:block])
            move_sums(LOAD, shape, S, stride)

    @T.prim_func(s_tir=True)
    def zero(c: T.handle) -> None:
        C = T.match_buffer(c, (held, block), accumulator, offset_factor=1, scope=SCOPE)
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:held, 0:block])
            for i, j in T.grid(held, block):
                with T.sblock("init"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = T.Cast(accumulator, 0)

    @T.prim_func(s_tir=True)
    def nothing(c: T.handle) -> None:
        C = T.match_buffer(c, (held, block), accumulator, offset_factor=1, scope=SCOPE)
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:held, 0:block])
            T.evaluate(0)

    TensorIntrin.register(name + START, description, implementation)
    TensorIntrin.register(name + ZERO, zero, nothing)


def register_store(name: str, shape: Shape) -> None:
    """Running sums and products, which lie in the same tiles, to memory."""
    rows, block, accumulator, alone = shape.rows, shape.columns, shape.accumulator, shape.alone

    @T.prim_func(s_tir=True)
    def description(f: T.handle, c: T.handle, o: T.handle) -> None:
        F = T.match_buffer(f, (rows, block), accumulator, offset_factor=1, scope=SCOPE)
        C = T.match_buffer(c, (rows, block), accumulator, offset_factor=1, scope=SCOPE)
        O = T.match_buffer(o, (rows, block), accumulator, offset_factor=1)
        with T.sblock("root"):
            T.reads(F[0:rows, 0:block], C[0:rows, 0:block])
            T.writes(O[0:rows, 0:block])
            if alone:  # TVM leaves out the loop over one row
                for j in T.serial(0, block):
                    with T.sblock("store"):
                        vj = T.axis.spatial(block, j)
                        O[0, vj] = F[0, vj] + C[0, vj]
            else:
                for i, j in T.grid(rows, block):
                    with T.sblock("store"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        O[vi, vj] = F[vi, vj] + C[vi, vj]

    @T.prim_func(s_tir=True)
    def implementation(f: T.handle, c: T.handle, o: T.handle) -> None:
        stride = T.int64()
        F = T.match_buffer(f, (rows, block), accumulator, offset_factor=1, scope=SCOPE)
        C = T.match_buffer(c, (rows, block), accumulator, offset_factor=1, scope=SCOPE)
        O = T.match_buffer(o, (rows, block), accumulator, offset_factor=1, strides=[stride, 1])
        with T.sblock("root"):
            T.reads(F[0:rows, 0:block], C[0:rows, 0:block])
            T.writes(O[0:rows, 0:block])
            move_sums(SAVE, shape, O, stride)

    TensorIntrin.register(name, description, implementation)
