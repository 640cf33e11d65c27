"""Names that the driver's files share: GlobalVars of the private functions, and the fields of plan and matrix."""

from __future__ import annotations

from tvm.ir import GlobalVar

from ...plan import Field, Matrix

F = Field
M = Matrix
FIELDS = len(Field)
MATRIX_FIELDS = len(Matrix)


class N:
    """The private functions of a module that the driver calls."""

    tile = {"gate_up": GlobalVar("tile_gate_up"), "down": GlobalVar("tile_down")}  # noqa: RUF012
    tile_more = {"gate_up": GlobalVar("tile_more_gate_up"), "down": GlobalVar("tile_more_down")}  # noqa: RUF012
    activate = GlobalVar("activate")
    prepare = GlobalVar("prepare")
    combine = GlobalVar("combine")
    combine_tail = GlobalVar("combine_tail")
    panel = {"gate_up": GlobalVar("panel_gate_up"), "down": GlobalVar("panel_down")}  # noqa: RUF012
    fetch_ahead = GlobalVar("fetch_ahead")
    prepare_item = GlobalVar("prepare_item")
    gate_up_item = GlobalVar("gate_up_item")
    gather = GlobalVar("gather")
    gather_item = GlobalVar("gather_item")
    interleave = GlobalVar("interleave")
    finish_block = GlobalVar("finish_block")
    down_item = GlobalVar("down_item")
    combine_item = GlobalVar("combine_item")
    worker = GlobalVar("worker")
    pack_panel = GlobalVar("pack_panel")
    pack_direct = GlobalVar("pack_direct")
    pack_part = GlobalVar("pack_part")
    tiles = {"int32": GlobalVar("tiles_int32"), "int64": GlobalVar("tiles_int64")}  # noqa: RUF012
