"""AMX's tile registers: a thread's configuration of them, and moves between them and memory.

Eight tiles of 16 rows of 64 bytes. Moves are assembly with a displacement: LLVM's own intrinsics take an address alone, and
so an instruction more for each.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.script import tirx as T

from . import ThreadState

ROWS, ROW_BYTES, TILES = 16, 64, 8
LOAD, SAVE = "moe_tile_load", "moe_tile_save"
ASSEMBLY = {LOAD: "tileloadd ${{1:c}}($0,$2), %tmm{0}", SAVE: "tilestored %tmm{0}, ${{1:c}}($0,$2)"}
EXTERN = tirx.call_extern("int32", LOAD).op


def move(function: str, tile: int, buffer: tirx.Buffer, at: tuple[int, ...], stride_bytes: tirx.PrimExpr) -> None:
    """In TVMScript: between a tile and the rows that begin at an element of ``buffer``."""
    pointer = tirx.address_of(tirx.BufferLoad(buffer, list(at)))
    stride, displacement = tirx.Cast("int64", stride_bytes), tirx.const(0, "int64")
    T.evaluate(tirx.call_extern("int32", f"{function}_{tile}", pointer, displacement, stride))


def displaced(call: Call) -> Call:
    """A move with what is constant in its address as its displacement: the steps of a loop share one register."""
    name = call.args[0].value if call.op.same_as(EXTERN) else ""
    if not name.startswith((LOAD, SAVE)):
        return call
    _, pointer, _, stride = call.args
    (element,) = pointer.args
    (index,) = element.indices
    if not (isinstance(index, tirx.Add) and isinstance(index.b, tirx.IntImm)):
        return call
    base = tirx.address_of(tirx.BufferLoad(element.source, [index.a]))
    displacement = int(index.b) * tvm.DataType(str(element.source.dtype)).itemsize
    return tirx.call_extern("int32", name, base, tirx.const(displacement, "int64"), stride)


@tirx.transform.prim_func_pass(opt_level=0)
def displace_moves(func: tirx.PrimFunc, mod: Any, ctx: Any) -> tirx.PrimFunc:
    """After loops have been unrolled and indices simplified: constants come last in them."""
    return func.with_body(tvm_ffi.structural_map(func.body, (Call, displaced)))


def llvm_ir(mcpu: str) -> str:
    """What `move` calls: ``<function>_<tile>(address, displacement, bytes between rows)``."""
    return "\n".join(
        f"""
define internal i32 @{name}_{tile}(ptr %p, i64 %displacement, i64 %stride) alwaysinline {{
  call void asm sideeffect "{text.format(tile)}", "r,i,r,~{{tmm{tile}}},~{{memory}}"(ptr %p, i64 %displacement, i64 %stride)
  ret i32 0
}}"""
        for name, text in ASSEMBLY.items()
        for tile in range(TILES)
    )


def configuration(rows: int) -> str:
    """Palette 1 for a tile of so many rows: 2x2 tiles of sums where they are more than 16, 1x4 else (see `tiles`)."""
    upper, lower = (ROWS, rows - ROWS) if rows > ROWS else (rows, rows)
    counts = [upper, upper, lower, lower, upper, lower if rows > ROWS else ROWS, ROWS, ROWS]
    sizes = ", ".join([f"i16 {ROW_BYTES}"] * TILES + ["i16 0"] * TILES)
    of = ", ".join(f"i8 {n}" for n in [*counts, *[0] * TILES])
    return f"%tiles {{ i8 1, i8 0, [14 x i8] zeroinitializer, [16 x i16] [{sizes}], [16 x i8] [{of}] }}"


def thread_state() -> ThreadState:
    """A thread's tiles, of 16 rows until it says what the next tile has, until they are released.

    A tile of fewer rows reads, multiplies and writes those alone. The thread remembers what its tiles are like: all panels
    of a block have tiles of the same rows, and so mostly one configuration.
    """
    table = ",\n  ".join(configuration(rows) for rows in range(1, 2 * ROWS + 1))
    return ThreadState(
        "moe_tiles_configure",
        "moe_tiles_release",
        "moe_tiles_shape",
        f"""
%tiles = type {{ i8, i8, [14 x i8], [16 x i16], [16 x i8] }}
@moe_tiles = internal constant [{2 * ROWS} x %tiles] [
  {table}], align 64
@moe_tiles_rows = internal thread_local global i64 0
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
define internal i32 @moe_tiles_take(i64 %rows) {{
  %i = sub i64 %rows, 1
  %at = getelementptr [{2 * ROWS} x %tiles], ptr @moe_tiles, i64 0, i64 %i
  call void @llvm.x86.ldtilecfg(ptr %at)
  store i64 %rows, ptr @moe_tiles_rows
  ret i32 0
}}
define internal i32 @moe_tiles_shape(i64 %wanted) {{
  %two = icmp eq i64 %wanted, {2 * ROWS}
  %rows = select i1 %two, i64 {ROWS}, i64 %wanted
  %now = load i64, ptr @moe_tiles_rows
  %same = icmp eq i64 %now, %rows
  br i1 %same, label %done, label %take
take:
  %r = call i32 @moe_tiles_take(i64 %rows)
  br label %done
done:
  ret i32 0
}}
define internal i32 @moe_tiles_configure() {{
  %r = call i32 @moe_tiles_take(i64 {ROWS})
  ret i32 0
}}
define internal i32 @moe_tiles_release() alwaysinline {{
  call void @llvm.x86.tilerelease()
  ret i32 0
}}
""",
    )


THREAD = thread_state()
