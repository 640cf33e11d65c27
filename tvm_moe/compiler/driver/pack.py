"""Packing in TVMScript: one expert's matrix [N, K] (rows contiguous) into panels [panels, K / group, NR, group].

Column c of gate/up panel p is intermediate column ``p * half + c % half`` of part ``c // half`` (gate, then up); its source
row is ``i * row_step + part * part_step``. Columns past the end and K past the end are zero, so that any H and I work.
Start values of an offset kernel undo the offset: ``-offset * sum_k w[n, k]``.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import StringImm
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ...plan import PACK_UNITS as UNITS
from ...plan import pack_row, pack_temp_bytes
from ..compute import bf16_to_f32, f32_to_bf16
from ..intrin import transpose
from ..mathfn import round_bits
from .names import N

SOURCES = {0: "uint16", 1: "float32", 2: "int8"}  # source codes; uint16 holds bf16


def sources(kernel: MicroKernel) -> dict[int, str]:
    """INT8 takes stored int8 weights and quantizes the others; BF16 takes floating weights."""
    return {code: s for code, s in SOURCES.items() if kernel.dtype == "int8" or s != "int8"}


def pack_panel(kernel: MicroKernel, source: str) -> tirx.PrimFunc:
    """One panel: scales (INT8 from floats), then chunk by chunk convert and transpose."""
    NR, group, offset = kernel.NR, kernel.group, kernel.offset
    integer = kernel.dtype == "int8"
    quantizes = integer and source != "int8"
    chunk = UNITS * group
    row, size = pack_row(kernel), kernel.itemsize
    LANES, transpose_lanes = transpose.lanes(group * size), transpose.function(group * size)

    def value(element: tirx.PrimExpr) -> tirx.PrimExpr:
        return bf16_to_f32(element) if source == "uint16" else element

    def magnitude(element: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.reinterpret("int32", value(element)) & tirx.const(0x7FFFFFFF, "int32")

    def packed(element: tirx.PrimExpr, scale: tirx.PrimExpr) -> tirx.PrimExpr:
        if source == "int8" or (source == "uint16" and not integer):
            return element
        return round_bits(value(element) / scale).astype("int8") if integer else f32_to_bf16(value(element))

    @T.prim_func(private=True, s_tir=True)
    def pack_panel(
        src: T.handle(source), p: T.int64, row_step: T.int64, part_step: T.int64, n_stride: T.int64,
        valid: T.int64, K: T.int64, half: T.int64, k_groups: T.int64,
        out: T.handle(kernel.weight), start: T.handle("int32"), scale: T.handle("float32"),
        temp: T.handle(kernel.weight), rows: T.handle("int64"),
    ) -> None:  # fmt: skip
        S = T.decl_buffer((T.int64(1) << T.int64(60),), source, data=src)
        W = T.decl_buffer((k_groups, NR, group), kernel.weight, data=out)
        B = T.decl_buffer((NR,), "int32", data=start)
        D = T.decl_buffer((NR,), "float32", data=scale)
        M = T.decl_buffer((NR, row), kernel.weight, data=temp)
        R = T.decl_buffer((NR,), "int64", data=rows)  # where the column's source row starts
        total = T.alloc_buffer((1,), "int32", scope="local")
        # Columns past the end read the last one and are zeroed afterwards: no branch in the loops.
        for c in range(T.int64(NR)):
            i: T.let = T.min(p * half + c % half, valid - T.int64(1))
            R[c] = (i * row_step + c // half * part_step) * n_stride
            if integer:
                B[c] = 0
        if quantizes:
            for c in range(T.int64(NR)):
                first: T.let = R[c]
                total[0] = 0
                for k in range(K):
                    total[0] = T.max(total[0], magnitude(S[first + k]))
                B[c] = total[0]
            for c in range(T.int64(NR)):
                if B[c] == 0:
                    D[c] = T.float32(1)
                else:
                    D[c] = T.reinterpret(B[c], dtype="float32") / T.float32(127)
                B[c] = 0
        for q in range((k_groups + T.int64(UNITS - 1)) // T.int64(UNITS)):
            k0: T.let = q * T.int64(chunk)
            kn: T.let = T.min(K - k0, T.int64(chunk))
            units: T.let = T.min(T.int64(UNITS), k_groups - q * T.int64(UNITS))
            for c in range(T.int64(NR)):
                first: T.let = R[c] + k0
                by: T.let = D[c]
                for k in range(kn):
                    M[c, k] = packed(S[first + k], by)
            for c in range(T.int64(NR)):
                used: T.let = T.if_then_else(p * half + c % half < valid, kn, T.int64(0))
                for k in range(units * T.int64(group) - used):
                    M[c, used + k] = T.Cast(kernel.weight, 0)
                if integer:
                    total[0] = 0
                    for k in range(units * T.int64(group)):
                        total[0] = total[0] + T.Cast("int32", M[c, k])
                    B[c] = B[c] - total[0] * offset
            blocks: T.let = units // T.int64(LANES)
            for v in range(blocks):
                for c in range(T.int64(NR // LANES)):
                    T.evaluate(
                        T.call_extern(
                            "int32",
                            transpose_lanes,
                            T.address_of(M[c * T.int64(LANES), v * T.int64(LANES * group)]),
                            T.int64(row * size),
                            T.address_of(W[q * T.int64(UNITS) + v * T.int64(LANES), c * T.int64(LANES), 0]),
                            T.int64(NR * group * size),
                        )
                    )
            for rest in range(units - blocks * T.int64(LANES)):
                u: T.let = blocks * T.int64(LANES) + rest
                for c in range(T.int64(NR)):
                    for j in T.vectorized(group):
                        W[q * T.int64(UNITS) + u, c, j] = M[c, u * T.int64(group) + j]
        if quantizes:
            for c in range(T.int64(NR)):
                if p * half + c % half >= valid:
                    D[c] = T.float32(1)

    text = StringImm(transpose.llvm_ir(group * size))
    return pack_panel.with_body(tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", text, pack_panel.body))


def entry(kernel: MicroKernel) -> tirx.PrimFunc:
    """The exported ``pack``: all panels of one matrix, in parallel; ``temp`` holds `plan.pack_temp_bytes` a thread."""
    pack_panel, NR = N.pack_panel, kernel.NR
    each, rows_at = pack_temp_bytes(kernel), NR * pack_row(kernel) * kernel.itemsize
    unit_bytes = kernel.group * kernel.itemsize

    @T.prim_func(s_tir=True)
    def pack(
        src: T.handle, source: T.int64, row_step: T.int64, part_step: T.int64, n_stride: T.int64,
        valid: T.int64, K: T.int64, half: T.int64, panels: T.int64, k_groups: T.int64,
        out: T.handle, start: T.handle, scale: T.handle, temp: T.handle, threads: T.int64,
    ) -> None:  # fmt: skip
        T.func_attr({"global_symbol": "pack", "tirx.noalias": True})
        T.evaluate(T.call_extern("int32", "moe_set_threads", T.Cast("int32", threads)))
        for th in T.parallel(threads):
            for q in range((th + T.int64(1)) * panels // threads - th * panels // threads):
                p: T.let = th * panels // threads + q
                pack_panel(
                    source, src, p, row_step, part_step, n_stride, valid, K, half, k_groups,
                    T.handle_add_byte_offset(out, p * k_groups * T.int64(NR * unit_bytes)),
                    T.handle_add_byte_offset(start, p * T.int64(NR * 4)),
                    T.handle_add_byte_offset(scale, p * T.int64(NR * 4)),
                    T.handle_add_byte_offset(temp, th * T.int64(each)),
                    T.handle_add_byte_offset(temp, th * T.int64(each) + T.int64(rows_at)),
                )  # fmt: skip

    return pack
