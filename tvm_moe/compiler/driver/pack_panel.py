"""Packing one panel: scales, and chunk by chunk what must be converted or padded; the rest goes the fast way.

A chunk is PACK_UNITS K groups of all NR columns, converted into rows that stay in L1 and transposed from there.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ...plan import PACK_UNITS as UNITS
from ...plan import pack_row
from ..compute import bf16_to_f32, f32_to_bf16
from ..intrin import transpose, with_llvm
from ..intrin.prefetch import prefetch
from ..intrin.transpose import LINE
from ..mathfn import divided, f32, round_bits
from .names import N


def pack_panel(kernel: MicroKernel, source: str) -> tirx.PrimFunc:
    """Panel ``p`` from ``source`` weights; column c's source row is R[c] (see `pack`)."""
    NR, group, offset = kernel.NR, kernel.group, kernel.offset
    integer = kernel.dtype == "int8"
    quantizes = integer and source != "int8"
    word = "uint16" if source == "uint16" else "uint32"  # bits of a source element
    straight = source == kernel.weight
    chunk = UNITS * group
    row, size = pack_row(kernel), kernel.weight_size
    unit, with_sums = group * size, bool(offset)
    per_line, LANES = LINE // tvm.DataType(source).itemsize, transpose.lanes(unit)
    direct = straight and LANES <= NR // 2  # source rows of a block are all gate, or all up
    pack_direct = N.pack_direct

    def value(element: tirx.PrimExpr) -> tirx.PrimExpr:
        return bf16_to_f32(element) if source == "uint16" else element

    def magnitude(element: tirx.PrimExpr) -> tirx.PrimExpr:
        """Its bits without the sign, which are in the order of what they stand for; 16 of them where the source has 16."""
        bits = element if source == "uint16" else tirx.reinterpret("uint32", element)
        return bits & tirx.const(0x7FFF if source == "uint16" else 0x7FFFFFFF, word)

    def from_bits(bits: tirx.PrimExpr) -> tirx.PrimExpr:
        return value(bits if source == "uint16" else tirx.reinterpret("float32", bits))

    def packed(element: tirx.PrimExpr, by: tirx.PrimExpr, reciprocal: tirx.PrimExpr | None = None) -> tirx.PrimExpr:
        if straight:
            return element
        if not integer:
            return f32_to_bf16(value(element))
        x = value(element)
        if reciprocal is not None:
            return round_bits(divided(x, by, reciprocal)).astype("int8")
        # A denormal scale has few bits: quotients beyond 127, as of the largest weight elsewhere, are that.
        return round_bits(tirx.max(tirx.min(x / by, f32(127.0)), f32(-127.0))).astype("int8")

    @T.prim_func(private=True, s_tir=True)
    def pack_panel(
        src: T.handle(source), p: T.int64, row_step: T.int64, part_step: T.int64, n_stride: T.int64,
        valid: T.int64, K: T.int64, half: T.int64, k_groups: T.int64,
        out: T.handle(kernel.weight), start: T.handle("int32"), scale: T.handle("float32"),
        chunk_at: T.handle(kernel.weight), rows_at: T.handle("int64"), sums_at: T.handle("int32"),
    ) -> None:  # fmt: skip
        S = T.decl_buffer((T.int64(1) << T.int64(60),), source, data=src)
        W = T.decl_buffer((k_groups, NR, group), kernel.weight, data=out)
        A = T.decl_buffer((NR,), "int32", data=start)
        D = T.decl_buffer((NR,), "float32", data=scale)
        C = T.decl_buffer((NR, row), kernel.weight, data=chunk_at)
        R = T.decl_buffer((NR,), "int64", data=rows_at)  # where the column's source row starts
        B = T.decl_buffer((NR,), "int32", data=sums_at)  # of its weights
        top = T.alloc_buffer((1,), word, scope="local")  # a column's largest magnitude
        done = T.alloc_buffer((1,), "int64", scope="local")  # chunks
        # Columns past the end read the last one and are zeroed afterwards: no branch in the loops.
        for c in range(T.int64(NR)):
            i: T.let = T.min(p * half + c % half, valid - T.int64(1))
            R[c] = (i * row_step + c // half * part_step) * n_stride
            B[c] = 0
        if quantizes:
            for c in range(T.int64(NR)):
                first: T.let = R[c]
                top[0] = T.Cast(word, 0)
                for k in range(K):
                    top[0] = T.max(top[0], magnitude(S[first + k]))
                D[c] = from_bits(top[0]) / T.float32(127)
                if D[c] == T.float32(0):  # of zeros, or of denormals too small for a scale
                    D[c] = T.float32(1)
        done[0] = T.int64(0)
        if direct:  # noqa: SIM102 - decides when this is parsed: the call fits no other source
            if (p + T.int64(1)) * half <= valid:
                done[0] = K // T.int64(chunk)
                pack_direct(src, rows_at, row_step, n_stride, done[0] * T.int64(UNITS), out, sums_at)
        chunks: T.let = (k_groups + T.int64(UNITS - 1)) // T.int64(UNITS)
        while done[0] < chunks:
            q: T.let = done[0]
            k0: T.let = q * T.int64(chunk)
            kn: T.let = T.min(K - k0, T.int64(chunk))
            units: T.let = T.min(T.int64(UNITS), k_groups - q * T.int64(UNITS))
            # What this column needs next: the panel's next chunk, or the next panel's first one. Where the panel has been
            # read already, for its scales, it is in L2: then the same chunk of the next panel.
            in_panel: T.let = tirx.all(tirx.const(not quantizes), (q + T.int64(1)) * T.int64(UNITS) < k_groups)
            next_k: T.let = T.if_then_else(
                in_panel, k0 + T.int64(chunk), half * row_step * n_stride + (k0 if quantizes else T.int64(0))
            )
            for c in range(T.int64(NR)):
                first: T.let = R[c] + k0
                by: T.let = D[c]
                for line in range((kn + T.int64(per_line - 1)) // T.int64(per_line)):
                    at: T.let = (R[c] + next_k) * T.int64(LINE // per_line) + line * T.int64(LINE)
                    T.evaluate(prefetch(T.handle_add_byte_offset(src, at)))
                # Nothing under- or overflows between these bounds, for a quotient that does not round to zero.
                if tirx.all(
                    tirx.const(kernel.fused and quantizes), by >= T.float32(2.0**-100), by <= T.float32(2.0**100)
                ):
                    reciprocal: T.let = T.float32(1) / by
                    for k in range(kn):
                        C[c, k] = packed(S[first + k], by, reciprocal)
                else:
                    for k in range(kn):
                        C[c, k] = packed(S[first + k], by)
            for c in range(T.int64(NR)):
                used: T.let = T.if_then_else(p * half + c % half < valid, kn, T.int64(0))
                for k in range(units * T.int64(group) - used):
                    C[c, used + k] = T.Cast(kernel.weight, 0)
            blocks: T.let = units // T.int64(LANES)
            for v in range(blocks):
                for c in range(T.int64(NR // LANES)):
                    T.evaluate(
                        transpose.call(
                            unit,
                            T.address_of(C[c * T.int64(LANES), v * T.int64(LANES * group)]), T.int64(row * size),
                            T.address_of(W[q * T.int64(UNITS) + v * T.int64(LANES), c * T.int64(LANES), 0]),
                            T.int64(NR * unit),
                            T.address_of(B[c * T.int64(LANES)]) if with_sums else None,
                        )
                    )  # fmt: skip
            for rest in range(units - blocks * T.int64(LANES)):
                u: T.let = blocks * T.int64(LANES) + rest
                for c in range(T.int64(NR)):
                    for j in T.vectorized(group):
                        W[q * T.int64(UNITS) + u, c, j] = C[c, u * T.int64(group) + j]
                    if with_sums:
                        for j in T.unroll(group):
                            B[c] = B[c] + T.Cast("int32", C[c, u * T.int64(group) + j])
            done[0] = q + T.int64(1)
        if offset != 0:
            for c in range(T.int64(NR)):
                A[c] = B[c] * -offset
        if quantizes:
            for c in range(T.int64(NR)):
                if p * half + c % half >= valid:
                    D[c] = T.float32(1)

    return with_llvm(pack_panel, transpose.llvm_ir(unit, with_sums))
