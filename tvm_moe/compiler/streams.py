"""Operands of a K loop read as streams: up to four registers a load, each load at the address its predecessor has moved to.

It applies where a loop says so (`STREAM`), after it has been unrolled. LLVM makes such loads only of intrinsics and of
addresses it cannot see through: intrin/stream.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.sym import Analyzer

from .intrin.stream import MOST, MOST_SUMS, REGISTER

STREAM = "moe_decision.stream"  # annotation of a loop: 1 where its operands are to be read so
STEPS = "moe_steps"  # annotation of a loop: how many of its steps were before it was unrolled


class Stream:
    """The vectors that a step of ``loop`` reads from one buffer. Positions are in bytes from the first one in its text."""

    def __init__(self, loop: tirx.For, first: TensorLoad) -> None:
        self.loop, self.first, self.vector = loop, first, vector_bytes(first)
        self.size = self.vector // int(first.indices[0].lanes)  # of an element
        self.cursor = tirx.decl_buffer((1,), "int64", name=f"{first.source.name}_cursor", scope="local")
        self.steps = int((loop.annotations or {}).get(STEPS, 1))
        self.positions: set[int] = set()
        self.chunks: list[tuple[int, int]] = []  # (position, bytes) of each load
        self.calls: list[tirx.PrimExpr] = []
        self.loaded: list[tirx.Var] = []

    def position(self, load: TensorLoad) -> int:
        return distance(base(load), base(self.first)) * self.size

    def cut(self) -> bool:
        """Into loads, in the order of addresses, of whole steps or a part of one; a step longer than a load may end in one.

        False: not into whole registers.
        """
        step, least = len(self.positions) * self.vector // self.steps, min(self.positions)
        for position in sorted(self.positions):
            begin, size = self.chunks[-1] if self.chunks else (0, MOST * REGISTER)
            crosses = step < MOST * REGISTER and MOST * REGISTER % step and (position - least) % step == 0
            if size < MOST * REGISTER and position == begin + size and not crosses:
                self.chunks[-1] = begin, size + self.vector
            else:
                self.chunks.append((position, self.vector))
        return not any(size % REGISTER for _, size in self.chunks)

    def begin(self) -> list[tirx.Stmt]:
        """The cursor at the loop's first load, and how far each load moves it."""
        k, at, first = self.loop.loop_var, self.loop.min, self.chunks[0][0]
        start = replaced(base(self.first), k, at) + first // self.size
        step = distance(replaced(base(self.first), k, at + 1), replaced(base(self.first), k, at)) * self.size
        ends = [*(position for position, _ in self.chunks[1:]), first + step]
        made: list[tirx.Stmt] = [
            tirx.AllocBuffer(self.cursor),
            tirx.Evaluate(
                tirx.call_extern("void", "moe_stream_from", self.pointer(), address(self.first.source, start))
            ),
        ]
        held: dict[int, tirx.Var] = {}  # steps: LLVM takes one that is not the size of the load from a register only
        for (position, size), end in zip(self.chunks, ends, strict=True):
            move = tirx.IntImm("int64", end - position)
            if move.value != size and move.value not in held:
                held[move.value] = tirx.Var("step", "int64")
                made.append(tirx.Bind(held[move.value], tirx.call_extern("int64", "moe_stream_step", move)))
            by = move if move.value == size else held[move.value]
            name = f"moe_stream_{size // REGISTER}"
            self.calls.append(tirx.call_extern(f"int8x{MOST * REGISTER}", name, self.pointer(), by))
        return made

    def pointer(self) -> tirx.PrimExpr:
        return address(self.cursor, tirx.IntImm("int64", 0))

    def due(self, load: TensorLoad) -> int:
        """How many loads up to the one that brings ``load`` have not been made."""
        return sum(begin <= self.position(load) for begin, _ in self.chunks) - len(self.loaded)

    def following(self) -> tirx.Stmt:
        """The next load."""
        self.loaded.append(tirx.Var("loaded", f"int8x{MOST * REGISTER}"))
        return tirx.Bind(self.loaded[-1], self.calls[len(self.loaded) - 1])

    def after(self, products: list[tirx.Stmt]) -> tirx.Stmt:
        """Keep the next load behind these products, and them before it: LLVM would load all at once, and spill."""
        sums = (address(product.buffer, base(product)) for product in products)
        return tirx.Evaluate(tirx.call_extern("void", f"moe_stream_after_{len(products)}", self.pointer(), *sums))

    def part(self, load: TensorLoad) -> tirx.PrimExpr:
        """What ``load`` stands for."""
        position = self.position(load)
        i = max(i for i, (begin, _) in enumerate(self.chunks) if begin <= position)
        name = f"moe_part_{self.vector}_{(position - self.chunks[i][0]) // self.vector}"
        return tirx.reinterpret(str(load.ty), tirx.call_pure_extern(f"int8x{self.vector}", name, self.loaded[i]))


def base(access: Any) -> tirx.PrimExpr:
    return access.indices[0].base


def address(buffer: Any, index: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.address_of(tirx.BufferLoad(buffer, [index]))


def replaced(expr: Any, var: tirx.Var, value: Any) -> Any:
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda v: value if v.same_as(var) else v))


def distance(a: tirx.PrimExpr, b: tirx.PrimExpr) -> int:
    return int(Analyzer().simplify(a - b))


def vector_bytes(load: TensorLoad) -> int:
    (index,) = load.indices
    return int(index.lanes) * tvm_ffi.dtype(str(load.source.dtype)).itemsize if isinstance(index, tirx.Ramp) else 0


def streamable(load: TensorLoad) -> bool:
    """A whole register or half of one, and no accumulator."""
    return load.source.scope() != "local" and vector_bytes(load) in (REGISTER // 2, REGISTER)


def operands(statement: tirx.Stmt) -> list[TensorLoad]:
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(statement, (TensorLoad, loads.append))
    return [load for load in loads if streamable(load)]


def found(loop: tirx.For, statements: list[tirx.Stmt]) -> list[Stream]:
    """The streams of a loop."""
    streams: list[Stream] = []
    for load in (load for statement in statements for load in operands(statement)):
        if (stream := of(streams, load)) is None:
            streams.append(stream := Stream(loop, load))
        stream.positions.add(stream.position(load))
    return [stream for stream in streams if stream.cut()]


def of(streams: list[Stream], load: TensorLoad) -> Stream | None:
    return next((s for s in streams if s.first.source.same_as(load.source)), None)


def streamed(loop: tirx.For) -> tirx.Stmt:
    """``loop`` with its operands read as streams, if it is annotated so."""
    if not int((loop.annotations or {}).get(STREAM, 0)):
        return loop
    statements = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
    streams = found(loop, statements)

    def value(load: TensorLoad) -> tirx.PrimExpr:
        stream = of(streams, load) if streamable(load) else None
        return load if stream is None else stream.part(load)

    before = [made for stream in streams for made in stream.begin()]
    body: list[tirx.Stmt] = []
    since: list[tirx.Stmt] = []  # products since the last load
    for statement in statements:
        for load in operands(statement):
            if (stream := of(streams, load)) is None:
                continue
            for _ in range(stream.due(load)):
                body += [stream.after(since)] if since else []
                body.append(stream.following())
                since = []
        body.append(tvm_ffi.structural_map(statement, (TensorLoad, value)))
        if isinstance(statement, tirx.BufferStore):  # not a prefetch
            since = [*since, statement][-MOST_SUMS:]
    return tirx.SeqStmt([*before, tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, tirx.SeqStmt(body))])


@tirx.transform.prim_func_pass(opt_level=0)
def stream_loads(func: tirx.PrimFunc, mod: Any, ctx: Any) -> tirx.PrimFunc:
    """The annotated loops with their operands read as streams."""
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, streamed)))
