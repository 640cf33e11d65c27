"""All functions of one micro-kernel row as one IRModule: tile kernels scheduled, driver around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import GlobalVar, PointerType, PrimType
from tvm.s_tir import Schedule

from tvm_moe.schedules import elementwise, style
from tvm_moe.schedules.skeleton import DECISION

from ..activations import FORMS
from ..kernels import MicroKernel
from ..tuning import STAGES, Choice, Decisions
from . import compute, intrin
from .driver import gemm, pack, pack_direct, pack_panel, rows, tiles, worker
from .driver.names import FEW, MANY, N
from .intrin.prefetch import prefetch
from .pipeline import subroutine

SOURCES = {0: "uint16", 1: "float32"}  # x_code -> storage type of hidden_states and the output
# The same, and whether rows are multiplied by weights: x_code + 2 where they are; and have a bias: 4 more.
WEIGHTED = {code + 2 * weighted: (source, weighted) for code, source in SOURCES.items() for weighted in (False, True)}
BIASED = {code + 4 * biased: (*kind, biased) for code, kind in WEIGHTED.items() for biased in (False, True)}


def scheduled(func: tirx.PrimFunc, schedule: Callable[[Schedule], None] | None) -> tirx.PrimFunc:
    """``func`` after ``schedule`` (None: as TE wrote it), as a private function over pointers."""
    s = Schedule(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    if schedule is not None:
        schedule(s)
    return subroutine(s.mod["main"])


def bare_tile(kernel: MicroKernel, arch: str, rows: int, chosen: Decisions = (), first: bool = False) -> tirx.PrimFunc:
    """The tile of ``rows`` rows with the decisions of a tune log, or with the schedule's defaults; ``first``: of K."""
    func = scheduled(
        compute.gemm_tile(kernel, rows, first=first), style(kernel.style)(kernel, arch, rows, dict(chosen)).apply
    )
    text = intrin.family(kernel.intrinsic).llvm_ir(kernel.mcpu(arch)) if kernel.intrinsic else ""
    return intrin.with_llvm(func, text)


def tile_function(
    kernel: MicroKernel, arch: str, rows: int, chosen: Decisions = (), first: bool = True
) -> tirx.PrimFunc:
    """`bare_tile` with prefetches, as the panel loop calls it."""
    return with_prefetch(bare_tile(kernel, arch, rows, chosen, first))


def with_prefetch(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Four more parameters: where to prefetch weights and rows from, and bytes per K group of each.

    The annotated K loop asks for its lines of the weights there, and for one line of the rows.
    """
    ahead, rows_ahead = (tirx.Var(name, PointerType(PrimType("void"))) for name in ("ahead", "rows_ahead"))
    step, rows_step = (tirx.Var(name, "int64") for name in ("step", "rows_step"))

    def insert(loop: tirx.For) -> tirx.For:
        lines = int(loop.annotations.get(f"{DECISION}prefetch", 0))
        if not lines:
            return loop
        k = loop.loop_var
        where = [tirx.handle_add_byte_offset(ahead, k * step + 64 * line) for line in range(lines)]
        where.append(tirx.handle_add_byte_offset(rows_ahead, k * rows_step))
        calls = [tirx.Evaluate(prefetch(at)) for at in where]
        return tirx.For(k, loop.min, loop.extent, loop.kind, tirx.SeqStmt([*calls, loop.body]), None, loop.annotations)

    body = tvm_ffi.structural_map(func.body, (tirx.For, insert))
    return tirx.PrimFunc([*func.params, ahead, step, rows_ahead, rows_step], body, attrs=func.attrs)


def switch(cases: dict[int, GlobalVar], like: tirx.PrimFunc) -> tirx.PrimFunc:
    """A private function that calls the case its first argument names, with the other arguments."""
    selector = tirx.Var("selector", "int64")
    params = [tirx.Var(p.name, p.ty) for p in like.params]
    body: tirx.Stmt = tirx.Evaluate(0)
    for code, target in cases.items():
        body = tirx.IfThenElse(selector == code, tirx.Evaluate(target(*params)), body)
    return tirx.PrimFunc([selector, *params], body).with_attr("s_tir", True)


def family(name: GlobalVar, variants: dict[int, tirx.PrimFunc]) -> dict[GlobalVar, tirx.PrimFunc]:
    """The variants under names of their own, and ``name`` as the switch over them."""
    functions = {code: GlobalVar(f"{name.name_hint}_{code}") for code in variants}
    chooser = switch(functions, next(iter(variants.values())))
    return {name: chooser, **{functions[code]: func for code, func in variants.items()}}


def tiles_and_panel(
    kernel: MicroKernel, arch: str, stage: str, decisions: Mapping[int, Decisions]
) -> dict[GlobalVar, tirx.PrimFunc]:
    """The tiles of these row counts and the function that multiplies a panel with them."""
    if kernel.few is None:
        return multiplying(kernel, arch, stage, decisions)
    few = {r: d for r, d in decisions.items() if kernel.serving(r) is kernel.few}
    many = {r: d for r, d in decisions.items() if r not in few}
    return {
        **multiplying(kernel.few, arch, stage + FEW, few),
        **multiplying(kernel, arch, stage + MANY, many),
        N.panel[stage]: gemm.few_or_many(kernel.few.MR, stage),
    }


def multiplying(
    kernel: MicroKernel, arch: str, stage: str, decisions: Mapping[int, Decisions]
) -> dict[GlobalVar, tirx.PrimFunc]:
    """The tiles of one row of the table and the loop over a panel that calls them."""
    families = {N.tile[stage]: True} | ({N.tile_more[stage]: False} if compute.adds_last(kernel) else {})
    functions = {N.panel[stage]: gemm.panel(kernel, stage)}
    for name, first in families.items():
        functions |= family(name, {r: tile_function(kernel, arch, r, d, first) for r, d in decisions.items()})
    return functions


def panels(kernel: MicroKernel, arch: str, chosen: Choice | None) -> tuple[dict[GlobalVar, tirx.PrimFunc], GlobalVar]:
    """The functions that multiply panels, and the one of the down stage: the gate/up stage's own if decisions are equal."""
    decisions = chosen.decisions if chosen else {stage: dict.fromkeys(kernel.rows, ()) for stage in STAGES}
    stages = STAGES if decisions["down"] != decisions["gate_up"] else STAGES[:1]
    functions: dict[GlobalVar, tirx.PrimFunc] = {}
    for stage in stages:
        functions |= tiles_and_panel(kernel, arch, stage, decisions[stage])
    return functions, N.panel[stages[-1]]


def build_ir(kernel: MicroKernel, arch: str, chosen: Choice | None = None) -> tvm.IRModule:
    """The whole module of one row of the table for one architecture; ``chosen``: by a tune log, None: all defaults."""
    tail = compute.i64("columns")
    activation = partial(elementwise.activation, lanes=kernel.NR // 4)
    panel_functions, down_panel = panels(kernel, arch, chosen)
    functions = {
        **panel_functions,
        **family(
            N.activate,
            {code: scheduled(compute.epilogue_gate_up(kernel, *form), activation) for code, form in FORMS.items()},
        ),
        **family(
            N.prepare,
            {
                code: scheduled(
                    compute.prepare_rows(kernel, *kind), elementwise.quantize if kernel.dtype == "int8" else None
                )
                for code, kind in WEIGHTED.items()
            },
        ),
        **family(
            N.combine,
            {
                c: scheduled(compute.combine(kernel, *kind, kernel.NR), elementwise.combine)
                for c, kind in BIASED.items()
            },
        ),
        **family(
            N.combine_tail,
            {
                c: scheduled(compute.combine(kernel, *kind, tail), elementwise.combine_tail)
                for c, kind in BIASED.items()
            },
        ),
        N.prepare_item: rows.prepare_item(kernel),
        N.gate_up_item: gemm.gate_up_item(kernel),
        N.interleave: rows.interleave(kernel),
        N.finish_block: rows.finish_block(kernel),
        N.down_item: gemm.down_item(kernel, down_panel),
        N.combine_item: rows.combine_item(kernel),
        **family(N.gather, {c: scheduled(compute.gather(kernel, s), None) for c, s in SOURCES.items()}),
        N.gather_item: rows.gather_item(kernel),
        N.worker: worker.worker(kernel),
        N.tiles["int32"]: tiles.tiles(kernel, "int32"),
        N.tiles["int64"]: tiles.tiles(kernel, "int64"),
        **family(N.pack_panel, {c: pack_panel.pack_panel(kernel, s) for c, s in pack.sources(kernel).items()}),
        N.pack_direct: pack_direct.pack_direct(kernel),
        N.pack_part: pack.pack_part(kernel),
        GlobalVar("moe"): worker.entry(),
        GlobalVar("pack"): pack.entry(kernel),
        GlobalVar("check_panel"): gemm.check_panel(kernel),
    }
    return tvm.IRModule(functions)
