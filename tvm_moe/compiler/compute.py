"""What a tile computes, in TE: one definition for every ISA. Sizes that depend on the model are symbolic and 64-bit.

A GEMM tile multiplies R gathered activation rows with one packed panel (NR columns) over a chunk of K and continues a
running sum: ``out[r, n] = start[r * stride + n] + sum_k x[rows[r], k] * w[k // group, n, k % group]``. The first chunk of
K starts from the panel's packed start values (stride 0), the next ones from the sums so far (stride NR): each output is
one chain over ascending K, whatever the number of rows or chunks.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import te, tirx
from tvm.s_tir import SBlock

from ..activations import Activation
from ..kernels import MicroKernel
from . import intrin
from .mathfn import activate, at_least, f32, let, round_bits


def i64(name: str) -> tirx.Var:
    return te.var(name, "int64")


def bf16_to_f32(bits: tirx.PrimExpr) -> tirx.PrimExpr:
    """bf16 travels as uint16 (TVM has no LLVM bfloat type); widening is a shift."""
    return tirx.reinterpret("float32", bits.astype("uint32") << tirx.const(16, "uint32"))


def f32_to_bf16(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Round half to even as hardware does; NaN stays NaN (its low bits could otherwise carry into Inf)."""
    sixteen = tirx.const(16, "uint32")

    def rounded(bits: tirx.Var) -> tirx.PrimExpr:
        nearest = bits + ((bits >> sixteen) & tirx.const(1, "uint32")) + tirx.const(0x7FFF, "uint32")
        quiet = bits | tirx.const(0x400000, "uint32")
        magnitude = bits & tirx.const(0x7FFFFFFF, "uint32")
        kept = tirx.Select(magnitude > tirx.const(0x7F800000, "uint32"), quiet, nearest)
        return (kept >> sixteen).astype("uint16")

    return let(tirx.reinterpret("uint32", value), rounded)


def to_bf16(kernel: MicroKernel, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """The same by an instruction of the kernel's CPUs, if the intrinsic's file knows one."""
    family = intrin.family(kernel.intrinsic) if kernel.intrinsic else None
    return getattr(family, "round_to_bf16", f32_to_bf16)(value)


def operand(kernel: MicroKernel, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """A stored operand as the accumulator's type."""
    return bf16_to_f32(value) if kernel.dtype == "bf16" else value.astype("int32")


def gemm_tile(
    kernel: MicroKernel, rows_in_tile: int, static_groups: int | None = None, first: bool = False
) -> tirx.PrimFunc:
    """(x [tokens, ld], w [k_groups, NR, group], rows [R], start, out [R, NR]) -> out, in the accumulator's type.

    ``static_groups``: all sizes fixed, with so many K groups, as MetaSchedule's tasks want it.
    """
    if kernel.row_group > 1:
        lying = paired_tile if adds_last(kernel) else matrix_tile
        return lying(kernel, rows_in_tile, static_groups, first)
    NR, group = kernel.NR, kernel.group
    k_groups, stride = i64("k_groups"), i64("stride")
    tokens, ld = i64("tokens"), i64("ld")
    if static_groups is not None:
        k_groups, stride, tokens, ld = (tirx.const(v, "int64") for v in (static_groups, 0, 64, static_groups * group))
    x = te.placeholder((tokens, ld), kernel.activation, name="x")
    w = te.placeholder((k_groups, NR, group), kernel.weight, name="w")
    rows = te.placeholder((rows_in_tile,), "int32", name="rows")
    start = te.placeholder((rows_in_tile * stride + NR,), kernel.accumulator, name="start")
    k = te.reduce_axis((0, k_groups * group), "k")

    def product(r: tirx.Var, n: tirx.Var) -> tirx.PrimExpr:
        a = operand(kernel, x[rows[r].astype("int64"), k])
        return te.sum(a * operand(kernel, w[k // group, n, k % group]), axis=k)

    acc = te.compute((rows_in_tile, NR), product, name="acc")
    out = te.compute((rows_in_tile, NR), lambda r, n: acc[r, n], name="out")
    func = te.create_prim_func([x, w, rows, start, out])
    return continue_sum(func, func.params[3], stride)


def adds_last(kernel: MicroKernel) -> bool:
    """Whether a chunk's sums start from zero, the running sum is added last, and the first chunk has a tile of its own."""
    return kernel.row_group == 2


def column_block(rows: int) -> int:
    """Columns whose sums a tile of pairs of rows keeps at once: in 16 of 32 registers, or in 20 or 24 of them."""
    return {1: 32, 2: 32, 4: 16, 6: 16, 8: 8, 10: 8, 12: 8}[rows]


def paired_tile(kernel: MicroKernel, rows_in_tile: int, static_groups: int | None, first: bool) -> tirx.PrimFunc:
    """The same of interleaved rows, x [k_groups, rows, group]; sums are kept in blocks of 2x2, blocks of columns outside.

    The running sum is added last, not picked apart into blocks first, and not at all to the ``first`` chunk's: these kernels
    start from zero. A chunk is one chain. A row alone meets the instruction twice.
    """
    NR, group, block = kernel.NR, kernel.group, column_block(rows_in_tile)
    k_groups, stride = i64("k_groups"), i64("stride")
    if static_groups is not None:
        k_groups, stride = (tirx.const(v, "int64") for v in (static_groups, 0))
    x = te.placeholder((k_groups, rows_in_tile, group), kernel.activation, name="x")
    w = te.placeholder((k_groups, NR, group), kernel.weight, name="w")
    rows = te.placeholder((rows_in_tile,), "int32", name="rows")
    start = te.placeholder((rows_in_tile * stride + NR,), kernel.accumulator, name="start")
    k = te.reduce_axis((0, k_groups * group), "k")

    def product(b: tirx.Var, ro: tirx.Var, co: tirx.Var, ri: tirx.Var, ci: tirx.Var) -> tirx.PrimExpr:
        a = operand(kernel, x[k // group, 0 if rows_in_tile == 1 else ro * 2 + ri, k % group])
        return te.sum(a * operand(kernel, w[k // group, b * block + co * 2 + ci, k % group]), axis=k)

    acc = te.compute((NR // block, -(-rows_in_tile // 2), block // 2, 2, 2), product, name="acc")

    def total(r: tirx.Var, n: tirx.Var) -> tirx.PrimExpr:
        sum_of_chunk = acc[n // block, r // 2, n % block // 2, r % 2, n % 2]
        return sum_of_chunk if first else sum_of_chunk + start[r * stride + n]

    return te.create_prim_func([x, w, rows, start, te.compute((rows_in_tile, NR), total, name="out")])


def matrix_tile(kernel: MicroKernel, rows_in_tile: int, static_groups: int | None, first: bool) -> tirx.PrimFunc:
    """The same of interleaved rows, x [k_steps, rows, step], a step of K at a time; whole row groups have sums.

    The sums start from zero on top of the running ones, which lie in the same registers: one chain. A row alone stands for
    its group.
    """
    NR, group, depth, step = kernel.NR, kernel.group, kernel.depth, kernel.k_step
    steps = i64("k_steps") if static_groups is None else tirx.const(static_groups // depth, "int64")
    held = -(-rows_in_tile // kernel.row_group) * kernel.row_group
    x = te.placeholder((steps, rows_in_tile, step), kernel.activation, name="x")
    w = te.placeholder((steps * depth, NR, group), kernel.weight, name="w")
    rows = te.placeholder((rows_in_tile,), "int32", name="rows")
    start = te.placeholder((rows_in_tile, NR), kernel.accumulator, name="start")
    k = te.reduce_axis((0, steps * step), "k")

    def own(r: tirx.Var) -> tirx.PrimExpr:
        return r if rows_in_tile > 1 else 0

    def product(r: tirx.Var, n: tirx.Var) -> tirx.PrimExpr:
        a = operand(kernel, x[k // step, own(r), k % step])
        return te.sum(a * operand(kernel, w[k // group, n, k % group]), axis=k)

    running = te.compute((held, NR), lambda r, n: start[own(r), n], name="running")
    acc = te.compute((held, NR), product, name="acc")
    out = te.compute((rows_in_tile, NR), lambda r, n: running[r, n] + acc[r, n], name="out")
    func = te.create_prim_func([x, w, rows, start, out])
    return strided(func, "start") if static_groups is None else func


def continue_sum(func: tirx.PrimFunc, start: Any, stride: tirx.Var) -> tirx.PrimFunc:
    """Let the reduction begin from ``start`` instead of zero (TE's own `init` is dropped by create_prim_func)."""

    def seed(block: Any) -> Any:
        if block.init is None:
            return block
        store = block.init
        r, n = store.indices
        first = tirx.BufferStore(store.buffer, tirx.BufferLoad(start, [r * stride + n]), store.indices)
        return SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, block.body, first,
            block.alloc_buffers, block.match_buffers, block.annotations,
        )  # fmt: skip

    return func.with_body(tvm_ffi.structural_map(func.body, (SBlock, seed)))


def epilogue_gate_up(kernel: MicroKernel, activation: Activation, plain: bool) -> tirx.PrimFunc:
    """(acc [R, NR], x_scale, rows, w_scale [NR], bias [NR], alpha, limit, out [R, H]) with H = NR / 2 (NR without gate).

    ``out = act(gate, up)`` of f32(acc) * (x_scale * w_scale) + bias: f32 for INT8 (it is quantized per row later), bf16 for
    BF16, which ignores the scales. ``plain``: without limit and bias.
    """
    columns = kernel.NR // 2 if activation.gated else kernel.NR
    alpha, limit = te.var("alpha", "float32"), te.var("limit", "float32")
    acc = te.placeholder((i64("rows"), kernel.NR), kernel.accumulator, name="acc")
    bias = te.placeholder((kernel.NR,), "float32", name="bias")
    x_scale = te.placeholder((i64("tokens"),), "float32", name="x_scale")
    rows = te.placeholder((acc.shape[0],), "int32", name="row_ids")
    w_scale = te.placeholder((kernel.NR,), "float32", name="w_scale")

    def value(r: tirx.Var, n: tirx.Var) -> tirx.PrimExpr:
        total = acc(r, n)
        if kernel.dtype == "int8":
            total = total.astype("float32") * (x_scale[rows[r].astype("int64")] * w_scale[n])
        return total if plain else total + bias[n]

    def act(r: tirx.Var, i: tirx.Var) -> tirx.PrimExpr:
        g = value(r, i)
        u = value(r, i + columns) if activation.gated else g
        result = activate(activation.name, g, u, alpha, None if plain else limit)
        return to_bf16(kernel, result) if kernel.dtype == "bf16" else result

    out = te.compute((acc.shape[0], columns), act, name="out")
    return strided(te.create_prim_func([acc, x_scale, rows, w_scale, bias, alpha, limit, out]), "out")


def prepare_rows(kernel: MicroKernel, source: str, weighted: bool) -> tirx.PrimFunc:
    """Rows of ``source`` type ("float32", or "uint16" holding bf16) as the kernel's operand.

    ``weighted``: times a factor each.

    INT8: per token, scale = max(absmax, 1e-7) / 127, q = x / scale rounded half to even (|q| <= 127 by construction, so
    nothing saturates), stored with the kernel's offset; a row with NaN or Inf gets scale NaN. The maximum is taken over
    the bit patterns of |x|, which order like the values and put Inf and NaN on top. BF16: one rounding, or none.
    """
    rows, columns = i64("rows"), i64("columns")
    x = te.placeholder((rows, columns), source, name="x")
    factor = te.placeholder((rows,), "float32", name="factor")

    def value(r: tirx.Var, c: tirx.Var) -> tirx.PrimExpr:
        found = bf16_to_f32(x[r, c]) if source == "uint16" else x[r, c]
        return found * factor[r] if weighted else found

    as_it_is = source == "uint16" and not weighted
    if kernel.dtype == "bf16":
        out = te.compute(
            (rows, columns), lambda r, c: x[r, c] if as_it_is else to_bf16(kernel, value(r, c)), name="out"
        )
        unused = te.placeholder((rows,), "float32", name="scale")
        return strided(te.create_prim_func([x, factor, unused, out]), "x", "out")
    k = te.reduce_axis((0, columns), "k")
    bits = 16 if as_it_is else 32

    def magnitude(r: tirx.Var) -> tirx.PrimExpr:
        of = tirx.reinterpret(f"int{bits}", x[r, k] if as_it_is else value(r, k))
        return te.max(of & tirx.const((1 << (bits - 1)) - 1, f"int{bits}"), axis=k)

    peak = te.compute((rows,), magnitude, name="peak")

    def row_scale(r: tirx.Var) -> tirx.PrimExpr:
        absmax = peak[r].astype("int32") << tirx.const(32 - bits, "int32")
        least = at_least(tirx.reinterpret("float32", absmax), f32(1e-7))
        return tirx.Select(absmax < tirx.const(0x7F800000, "int32"), least / f32(127.0), f32(float("nan")))

    scale = te.compute((rows,), row_scale, name="scale")
    out = te.compute(
        (rows, columns),
        lambda r, c: (round_bits(value(r, c) / scale[r]) + kernel.offset).astype(kernel.activation),
        name="out",
    )
    return strided(te.create_prim_func([x, factor, scale, out]), "x", "out")


def gather(kernel: MicroKernel, source: str) -> tirx.PrimFunc:
    """Rows of ``source`` type (as in `prepare_rows`) that ``row_ids`` names, as the gate/up stage leaves an intermediate."""
    rows, columns = i64("rows"), i64("columns")
    x = te.placeholder((i64("tokens"), columns), source, name="x")
    ids = te.placeholder((rows,), "int32", name="row_ids")

    def value(r: tirx.Var, c: tirx.Var) -> tirx.PrimExpr:
        found = x[ids[r].astype("int64"), c]
        if kernel.dtype == "int8":
            return bf16_to_f32(found) if source == "uint16" else found
        return found if source == "uint16" else to_bf16(kernel, found)

    out = te.compute((rows, columns), value, name="out")
    return strided(te.create_prim_func([x, ids, out]), "x", "out")


def combine(kernel: MicroKernel, target: str, weighted: bool, biased: bool, columns: int | tirx.Var) -> tirx.PrimFunc:
    """(y [rows, NR], position, expert [T * k], weight [T, k], x_scale [rows], w_scale, bias [E, NR], out [T, columns]).

    f32 sum over the slots of a token in slot order, each (f32(y) * (w_scale * x_scale) + bias) * weight; BF16 ignores the
    scales. A slot with position -1 was skipped. ``weighted``: the weight is not 1. ``biased``: there is a bias.
    """
    tokens, top_k, experts, rows = i64("tokens"), i64("top_k"), i64("experts"), i64("rows")
    y = te.placeholder((rows, kernel.NR), kernel.accumulator, name="y")
    position, expert = (te.placeholder((tokens * top_k,), "int32", name=name) for name in ("position", "expert"))
    weight = te.placeholder((tokens, top_k), "float32", name="weight")
    x_scale = te.placeholder((rows,), "float32", name="x_scale")
    w_scale, bias = (te.placeholder((experts, kernel.NR), "float32", name=name) for name in ("w_scale", "bias"))
    j = te.reduce_axis((0, top_k), "j")

    def times(value: tirx.PrimExpr, t: tirx.Var) -> tirx.PrimExpr:
        return value * weight[t, j] if weighted else value

    def term(t: tirx.Var, n: tirx.Var) -> tirx.PrimExpr:
        slot = position[t * top_k + j]
        row, e = slot.astype("int64"), expert[t * top_k + j].astype("int64")
        value, scale = y(row, n), x_scale(row)
        early = kernel.dtype == "int8" and not biased  # the weight multiplies the scale of a row instead of its columns
        if kernel.dtype == "int8":
            value = value.astype("float32") * (w_scale[e, n] * (times(scale, t) if early else scale))
        if biased:
            value = value + bias(e, n)
        value = value if early else times(value, t)
        return te.sum(tirx.if_then_else(slot >= 0, value, f32(0.0)), axis=j)

    total = te.compute((tokens, kernel.NR), term, name="total")

    def result(t: tirx.Var, n: tirx.Var) -> tirx.PrimExpr:
        return to_bf16(kernel, total(t, n)) if target == "uint16" else total(t, n)

    out = te.compute((tokens, columns), result, name="out")
    func = te.create_prim_func([y, position, expert, weight, x_scale, w_scale, bias, out])
    return strided(skipping(func), "w_scale", "bias", "out")


def skipping(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A sum of ``if_then_else(condition, value, 0)`` without the additions of 0.

    As long as these are there, LLVM fuses some of the multiplications with the additions and others not.
    """

    def skip(block: Any) -> Any:
        if block.init is None:
            return block
        store = block.body
        condition, value, _ = store.value.b.args
        update = tirx.IfThenElse(condition, tirx.BufferStore(store.buffer, store.value.a + value, store.indices), None)
        return SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, update, block.init,
            block.alloc_buffers, block.match_buffers, block.annotations,
        )  # fmt: skip

    return func.with_body(tvm_ffi.structural_map(func.body, (SBlock, skip)))


def strided(func: tirx.PrimFunc, *names: str) -> tirx.PrimFunc:
    """Give the 2-D parameters called ``names`` a symbolic row stride ``<name>_stride``."""
    params, body = list(func.params), func.body
    for index, old in enumerate(params):
        if old.name not in names:
            continue
        strides = [i64(f"{old.name}_stride"), tirx.IntImm("int64", 1)]
        new = tirx.decl_buffer(old.shape, str(old.dtype), name=old.name, strides=strides)
        body = tvm_ffi.structural_map(body, (tirx.Var, lambda v, old=old, new=new: new if v.same_as(old) else v))
        params[index] = new
    return tirx.PrimFunc(params, body, attrs=func.attrs)
