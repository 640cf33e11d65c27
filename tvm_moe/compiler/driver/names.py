"""Names that the driver's files share: GlobalVars of the private functions, and the fields of plan and matrix."""

from __future__ import annotations

from tvm.ir import GlobalVar

from ...plan import Field, Matrix
from ...tuning import STAGES

# After a stage: its blocks of few rows, where another row of the table serves them, and its others.
FEW, MANY = "_few", "_many"
F = Field
M = Matrix
FIELDS = len(Field)
MATRIX_FIELDS = len(Matrix)


def by_stage(name: str) -> dict[str, GlobalVar]:
    """A function of each stage, and of its parts."""
    return {stage + part: GlobalVar(f"{name}_{stage}{part}") for stage in STAGES for part in ("", FEW, MANY)}


class N:
    """The private functions of a module that the driver calls."""

    tile = by_stage("tile")
    tile_more = by_stage("tile_more")
    activate = GlobalVar("activate")
    prepare = GlobalVar("prepare")
    combine = GlobalVar("combine")
    combine_tail = GlobalVar("combine_tail")
    panel = by_stage("panel")
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
