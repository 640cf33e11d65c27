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


def thread_state() -> ThreadState:
    """All tiles of 16 rows of 64 bytes (palette 1), for the calling thread, until they are released."""
    sizes = ", ".join([f"i16 {ROW_BYTES}"] * TILES + ["i16 0"] * TILES)
    rows = ", ".join([f"i8 {ROWS}"] * TILES + ["i8 0"] * TILES)
    return ThreadState(
        "moe_tiles_configure",
        "moe_tiles_release",
        f"""
@moe_tiles = internal constant {{ i8, i8, [14 x i8], [16 x i16], [16 x i8] }}
  {{ i8 1, i8 0, [14 x i8] zeroinitializer, [16 x i16] [{sizes}], [16 x i8] [{rows}] }}, align 64
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
define internal i32 @moe_tiles_configure() alwaysinline {{
  call void @llvm.x86.ldtilecfg(ptr @moe_tiles)
  ret i32 0
}}
define internal i32 @moe_tiles_release() alwaysinline {{
  call void @llvm.x86.tilerelease()
  ret i32 0
}}
""",
    )


THREAD = thread_state()
