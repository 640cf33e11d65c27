"""Packing in TVMScript: one expert's matrix [N, K] of any strides into panels [panels, K / group, NR, group].

Column c of gate/up panel p is intermediate column ``p * half + c % half`` of part ``c // half`` (gate, then up); its source
row is ``i * row_step + part * part_step``. Columns past the end and K past the end are zero, so that any H and I work.
Start values of an offset kernel undo the offset: ``-offset * sum_k w[n, k]``.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ...plan import PACK_UNITS as UNITS
from ..compute import bf16_to_f32, f32_to_bf16
from ..mathfn import round_bits
from .names import N

SOURCES = {0: "uint16", 1: "float32", 2: "int8"}  # source codes; uint16 holds bf16


def sources(kernel: MicroKernel) -> dict[int, str]:
    """INT8 takes stored int8 weights and quantizes the others; BF16 takes floating weights."""
    return {code: s for code, s in SOURCES.items() if kernel.dtype == "int8" or s != "int8"}


def pack_panel(kernel: MicroKernel, source: str) -> tirx.PrimFunc:
    """One panel: scales (INT8 from floats), then chunk by chunk convert and transpose."""
    NR, group, offset = kernel.NR, kernel.group, kernel.offset
    quantizes = kernel.dtype == "int8" and source != "int8"
    integer = kernel.dtype == "int8"
    chunk = UNITS * group

    def value(element: tirx.PrimExpr) -> tirx.PrimExpr:
        return bf16_to_f32(element) if source == "uint16" else element

    def magnitude_bits(element: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.reinterpret("int32", value(element)) & tirx.const(0x7FFFFFFF, "int32")

    def packed(element: tirx.PrimExpr, scale: tirx.PrimExpr) -> tirx.PrimExpr:
        if source == "int8":
            return element
        return round_bits(value(element) / scale).astype("int8") if integer else f32_to_bf16(value(element))

    zero = 0

    @T.prim_func(private=True, s_tir=True)
    def pack_panel(
        src: T.handle(source), p: T.int64, row_step: T.int64, part_step: T.int64, n_stride: T.int64, k_stride: T.int64,
        valid: T.int64, K: T.int64, half: T.int64, k_groups: T.int64,
        out: T.handle(kernel.weight), start: T.handle("int32"), scale: T.handle("float32"),
        temp: T.handle(kernel.weight),
    ) -> None:  # fmt: skip
        S = T.decl_buffer((T.int64(1) << T.int64(60),), source, data=src)
        W = T.decl_buffer((k_groups, NR, group), kernel.weight, data=out)
        B = T.decl_buffer((NR,), "int32", data=start)
        D = T.decl_buffer((NR,), "float32", data=scale)
        M = T.decl_buffer((NR, chunk), kernel.weight, data=temp)
        peak = T.alloc_buffer((1,), "int32", scope="local")
        if quantizes:
            for c in range(T.int64(NR)):
                i: T.let = p * half + c % half
                row: T.let = (i * row_step + c // half * part_step) * n_stride
                peak[0] = 0
                if i < valid:
                    for k in range(K):
                        peak[0] = T.max(peak[0], magnitude_bits(S[row + k * k_stride]))
                if peak[0] == 0:
                    D[c] = T.float32(1)
                else:
                    D[c] = T.reinterpret(peak[0], dtype="float32") / T.float32(127)
        if integer:
            for c in range(T.int64(NR)):
                B[c] = 0
        for q in range((k_groups + T.int64(UNITS - 1)) // T.int64(UNITS)):
            k0: T.let = q * T.int64(chunk)
            kn: T.let = T.max(T.min(K - k0, T.int64(chunk)), T.int64(0))
            units: T.let = T.min(T.int64(UNITS), k_groups - q * T.int64(UNITS))
            for c in range(T.int64(NR)):
                i: T.let = p * half + c % half
                row: T.let = (i * row_step + c // half * part_step) * n_stride + k0 * k_stride
                if i < valid:
                    for k in range(kn):
                        M[c, k] = packed(S[row + k * k_stride], D[c])
                    for k in range(units * T.int64(group) - kn):
                        M[c, kn + k] = T.Cast(kernel.weight, zero)
                else:
                    for k in range(units * T.int64(group)):
                        M[c, k] = T.Cast(kernel.weight, zero)
                if integer:
                    peak[0] = 0
                    for k in range(units * T.int64(group)):
                        peak[0] = peak[0] + T.Cast("int32", M[c, k])
                    B[c] = B[c] - peak[0] * offset
            for u in range(units):
                for c in range(T.int64(NR)):
                    for j in T.vectorized(group):
                        W[q * T.int64(UNITS) + u, c, j] = M[c, u * T.int64(group) + j]

    return pack_panel


def entry(kernel: MicroKernel) -> tirx.PrimFunc:
    """The exported ``pack``: all panels of one matrix, in parallel. `temp` holds NR * UNITS * group operands a thread."""
    pack_panel, NR = N.pack_panel, kernel.NR
    unit_bytes = kernel.group * kernel.itemsize

    @T.prim_func(s_tir=True)
    def pack(
        src: T.handle, source: T.int64, row_step: T.int64, part_step: T.int64, n_stride: T.int64, k_stride: T.int64,
        valid: T.int64, K: T.int64, half: T.int64, panels: T.int64, k_groups: T.int64,
        out: T.handle, start: T.handle, scale: T.handle, temp: T.handle, threads: T.int64,
    ) -> None:  # fmt: skip
        T.func_attr({"global_symbol": "pack", "tirx.noalias": True})
        T.evaluate(T.call_extern("int32", "moe_set_threads", T.Cast("int32", threads)))
        for th in T.parallel(threads):
            for q in range((th + T.int64(1)) * panels // threads - th * panels // threads):
                p: T.let = th * panels // threads + q
                pack_panel(
                    source, src, p, row_step, part_step, n_stride, k_stride, valid, K, half, k_groups,
                    T.handle_add_byte_offset(out, p * k_groups * T.int64(NR * unit_bytes)),
                    T.handle_add_byte_offset(start, p * T.int64(NR * 4)),
                    T.handle_add_byte_offset(scale, p * T.int64(NR * 4)),
                    T.handle_add_byte_offset(temp, th * T.int64(NR * UNITS * unit_bytes)),
                )  # fmt: skip

    return pack
