"""Packing in TVMScript: one expert's matrix [N, K] (rows contiguous) into panels [panels, K / group, NR, group].

Column c of gate/up panel p is intermediate column ``p * half + c % half`` of part ``c // half`` (gate, then up); its source
row is ``i * row_step + part * part_step``. Columns past the end and K past the end are zero, so that any H and I work.
Start values of an offset kernel undo the offset: ``-offset * sum_k w[n, k]``.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import StringImm
from tvm.script import tirx as T

from ...kernels import MicroKernel
from ...plan import PACK_UNITS as UNITS
from ...plan import pack_row, pack_temp_bytes
from ..compute import bf16_to_f32, f32_to_bf16
from ..intrin import transpose
from ..intrin.prefetch import prefetch
from ..intrin.transpose import LINE
from ..mathfn import round_bits
from .names import MATRIX_FIELDS, M, N

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
    per_line = LINE // tvm.DataType(source).itemsize
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
        chunk_at: T.handle(kernel.weight), rows_at: T.handle("int64"), sums_at: T.handle("int32"),
    ) -> None:  # fmt: skip
        S = T.decl_buffer((T.int64(1) << T.int64(60),), source, data=src)
        W = T.decl_buffer((k_groups, NR, group), kernel.weight, data=out)
        A = T.decl_buffer((NR,), "int32", data=start)
        D = T.decl_buffer((NR,), "float32", data=scale)
        C = T.decl_buffer((NR, row), kernel.weight, data=chunk_at)
        R = T.decl_buffer((NR,), "int64", data=rows_at)  # where the column's source row starts
        B = T.decl_buffer((NR,), "int32", data=sums_at)  # of its weights; before that, bits of the largest magnitude
        total = T.alloc_buffer((1,), "int32", scope="local")
        # Columns past the end read the last one and are zeroed afterwards: no branch in the loops.
        for c in range(T.int64(NR)):
            i: T.let = T.min(p * half + c % half, valid - T.int64(1))
            R[c] = (i * row_step + c // half * part_step) * n_stride
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
        for c in range(T.int64(NR)):
            B[c] = 0
        for q in range((k_groups + T.int64(UNITS - 1)) // T.int64(UNITS)):
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
                for k in range(kn):
                    C[c, k] = packed(S[first + k], by)
            for c in range(T.int64(NR)):
                used: T.let = T.if_then_else(p * half + c % half < valid, kn, T.int64(0))
                for k in range(units * T.int64(group) - used):
                    C[c, used + k] = T.Cast(kernel.weight, 0)
                if offset != 0:
                    total[0] = 0
                    for k in range(units * T.int64(group)):
                        total[0] = total[0] + T.Cast("int32", C[c, k])
                    B[c] = B[c] + total[0]
            blocks: T.let = units // T.int64(LANES)
            for v in range(blocks):
                for c in range(T.int64(NR // LANES)):
                    T.evaluate(
                        T.call_extern(
                            "int32",
                            transpose_lanes,
                            T.address_of(C[c * T.int64(LANES), v * T.int64(LANES * group)]),
                            T.int64(row * size),
                            T.address_of(W[q * T.int64(UNITS) + v * T.int64(LANES), c * T.int64(LANES), 0]),
                            T.int64(NR * group * size),
                        )
                    )
            for rest in range(units - blocks * T.int64(LANES)):
                u: T.let = blocks * T.int64(LANES) + rest
                for c in range(T.int64(NR)):
                    for j in T.vectorized(group):
                        W[q * T.int64(UNITS) + u, c, j] = C[c, u * T.int64(group) + j]
        if offset != 0:
            for c in range(T.int64(NR)):
                A[c] = B[c] * -offset
        if quantizes:
            for c in range(T.int64(NR)):
                if p * half + c % half >= valid:
                    D[c] = T.float32(1)

    text = StringImm(transpose.llvm_ir(group * size))
    return pack_panel.with_body(tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", text, pack_panel.body))


def pack_part(kernel: MicroKernel) -> tirx.PrimFunc:
    """A thread's part of one matrix: panels ``first`` to ``end``."""
    pack_panel, NR = N.pack_panel, kernel.NR
    rows_from = NR * pack_row(kernel) * kernel.itemsize
    panel_group = NR * kernel.group * kernel.itemsize

    @T.prim_func(private=True, s_tir=True)
    def pack_part(matrix: T.handle("int64"), first: T.int64, end: T.int64, temp: T.handle) -> None:
        J = T.decl_buffer((MATRIX_FIELDS,), "int64", data=matrix)
        for q in range(end - first):
            p: T.let = first + q
            vectors: T.let = p * T.int64(NR * 4)
            pack_panel(
                J[M.SOURCE], T.handle_add_byte_offset(matrix, J[M.AT_FROM]), p, J[M.ROW_STEP], J[M.PART_STEP],
                J[M.N_STRIDE], J[M.VALID], J[M.K], J[M.HALF], J[M.GROUPS],
                T.handle_add_byte_offset(matrix, J[M.AT_PACKED] + p * J[M.GROUPS] * T.int64(panel_group)),
                T.handle_add_byte_offset(matrix, J[M.AT_START] + vectors),
                T.handle_add_byte_offset(matrix, J[M.AT_SCALE] + vectors),
                temp,
                T.handle_add_byte_offset(temp, T.int64(rows_from)),
                T.handle_add_byte_offset(temp, T.int64(rows_from + NR * 8)),
            )  # fmt: skip

    return pack_part


def entry(kernel: MicroKernel) -> tirx.PrimFunc:
    """The exported ``pack``: ``count`` matrices in one parallel region, cut by K groups into equal parts in a row.

    ``temp`` holds `plan.pack_temp_bytes` a thread. Several matrices at once, because new memory costs its page faults, a
    large part of a small matrix's time, and threads that get unequal shares of them wait for each other.
    """
    pack_part, each = N.pack_part, pack_temp_bytes(kernel)

    @T.prim_func(s_tir=True)
    def pack(matrices: T.handle("int64"), count: T.int64, temp: T.handle, threads: T.int64) -> None:
        T.func_attr({"global_symbol": "pack", "tirx.noalias": True})
        J = T.decl_buffer((count, MATRIX_FIELDS), "int64", data=matrices)
        total = T.alloc_buffer((1,), "int64", scope="local")
        total[0] = T.int64(0)
        for m in range(count):
            total[0] = total[0] + J[m, M.PANELS] * J[m, M.GROUPS]
        cost: T.let = total[0]
        T.evaluate(T.call_extern("int32", "moe_set_threads", T.Cast("int32", threads)))
        for th in T.parallel(threads):
            before = T.alloc_buffer((1,), "int64", scope="local")
            before[0] = T.int64(0)
            for m in range(count):
                groups: T.let = J[m, M.GROUPS]
                # A panel is this thread's where its cost begins within the thread's part.
                first: T.let = (th * cost // threads - before[0] + groups - T.int64(1)) // groups
                end: T.let = ((th + T.int64(1)) * cost // threads - before[0] + groups - T.int64(1)) // groups
                lo: T.let = T.max(T.int64(0), T.min(first, J[m, M.PANELS]))
                hi: T.let = T.max(T.int64(0), T.min(end, J[m, M.PANELS]))
                pack_part(
                    T.address_of(J[m, 0]), lo, hi, T.handle_add_byte_offset(temp, th * T.int64(each)),
                )  # fmt: skip
                before[0] = before[0] + J[m, M.PANELS] * groups

    return pack
