"""Schedules of everything around the GEMMs: epilogues, row preparation, combine. Nothing here is tuned."""

from __future__ import annotations

from tvm.s_tir import Schedule


def activation(s: Schedule, lanes: int) -> None:
    """Two registers of columns, then all rows: the constants of the activation stay in registers beside them."""
    row, column = s.get_loops(s.get_sblock("out"))
    outer, vector = s.split(column, [None, lanes])
    s.vectorize(vector)
    s.reorder(outer, row)


def quantize(s: Schedule) -> None:
    """Row by row: the peak, the scale, then the values; the symbolic column loops are left to LLVM's vectorizer."""
    (row,) = s.get_loops(s.get_sblock("scale"))
    peak = s.get_sblock("peak")
    s.reverse_compute_at(s.get_sblock("out"), row)
    s.compute_at(peak, row)
    s.set_scope(peak, 0, "local")


def combine(s: Schedule) -> None:
    """Token by token: all slots of a token are summed in registers, then stored."""
    total = s.get_sblock("total")
    token, _ = s.get_loops(s.get_sblock("out"))
    s.compute_at(total, token)
    s.set_scope(total, 0, "local")
    *_, column, slot = s.get_loops(total)
    outer, vector = s.split(column, [None, 16])
    s.reorder(slot, outer, vector)
    s.vectorize(vector)
    s.unroll(outer)
    s.decompose_reduction(total, slot)
    _, column = s.get_loops(s.get_sblock("out"))
    s.vectorize(column)


def combine_tail(s: Schedule) -> None:
    """The last panel of an H that is no multiple of NR: its columns are symbolic, each is summed alone."""
    total = s.get_sblock("total")
    _, column = s.get_loops(s.get_sblock("out"))
    s.compute_at(total, column)
    s.set_scope(total, 0, "local")
