"""Schedules: how the TE computes of `tvm_moe.compiler.compute` become loops, one class per ISA style.

``style(name)`` finds the class that a row of the micro-kernel table names.
"""

from __future__ import annotations

from .outer_product import OuterProduct
from .pair_product import PairProduct
from .skeleton import TileSchedule
from .tile_product import TileProduct

STYLES: dict[str, type[TileSchedule]] = {c.__name__: c for c in (OuterProduct, PairProduct, TileProduct)}


def style(name: str) -> type[TileSchedule]:
    return STYLES[name]


__all__ = ["STYLES", "TileSchedule", "style"]
