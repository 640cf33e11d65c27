"""From scheduled PrimFuncs to one IRModule: tile kernels become private functions over raw pointers, and the lowering
pipeline keeps "local" buffers on the stack.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import PointerType, PrimType
from tvm.s_tir.pipeline import default_s_tir_pipeline
from tvm.tirx import compilation_pipeline

from .intrin.tile_registers import displace_moves
from .streams import STEPS, stream_loads

PIPELINE = "tvm_moe"


def subroutine(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A private function of the buffers' pointers and scalars in order, then the symbolic sizes and strides in the order
    in which they first appear. The driver's stubs repeat that signature; LLVM's verifier catches a mismatch.
    """
    params: list[Any] = []
    declarations: list[Any] = []
    sizes: list[tirx.Var] = []
    for param in func.params:
        if not hasattr(param, "shape"):
            params.append(param)
            continue
        pointer = tirx.Var(f"{param.name}_ptr", PointerType(PrimType(str(param.dtype))))
        params.append(pointer)
        declarations.append(tirx.DeclBuffer(param, data=pointer))
        for extent in [*param.shape, *param.strides]:
            collect_vars(extent, sizes)
    private = tirx.PrimFunc(params + sizes, tirx.SeqStmt([*declarations, func.body]))
    for key, value in func.attrs.items():
        if key != "global_symbol":
            private = private.with_attr(key, value)
    return private


def collect_vars(expr: Any, found: list[tirx.Var]) -> None:
    """Append the variables of ``expr`` that ``found`` does not hold yet."""

    def visit(node: Any) -> None:
        if not any(node.same_as(var) for var in found):
            found.append(node)

    tvm_ffi.structural_walk(expr, (tirx.Var, visit))


def keep_on_stack(op: Any) -> Any:
    """Without this TVM turns every local accumulator into a heap workspace call, and fails inside private functions."""
    if op.buffer.scope() != "local":
        return op
    annotations = {**(op.annotations or {}), "disable_lower_builtin": tirx.IntImm("int32", 1)}
    return tirx.AllocBuffer(op.buffer, annotations, op.span)


UNROLL = "moe_decision.unroll"  # annotation of a loop: steps at a time
MANY = 8


@tirx.transform.prim_func_pass(opt_level=0)
def unroll_steps(func: tirx.PrimFunc, mod: Any, ctx: Any) -> tirx.PrimFunc:
    """Loops annotated so, several steps at a time: LLVM unrolls none of unknown length.

    What is left goes half as many at a time as long as these are many, then one by one.
    """

    def unroll(loop: tirx.For) -> tirx.Stmt:
        steps = int((loop.annotations or {}).get(UNROLL, 1))
        if steps == 1:
            return loop
        many = loop.extent // steps
        others = {name: value for name, value in loop.annotations.items() if name != UNROLL}
        left = others | {UNROLL: steps // 2} if steps // 2 >= MANY else {}
        q, u, rest = (tirx.Var(name, loop.loop_var.ty) for name in ("q", "u", "rest"))
        inner = tirx.For(u, 0, steps, tirx.ForKind.UNROLLED, at(loop, q * steps + u))
        outer = tirx.For(q, 0, many, loop.kind, inner, annotations=others | {STEPS: steps})
        body = at(loop, many * steps + rest)
        last = tirx.For(rest, 0, loop.extent - many * steps, loop.kind, body, annotations=left)
        return tirx.SeqStmt([outer, unroll(last)])

    def at(loop: tirx.For, k: tirx.PrimExpr) -> tirx.Stmt:
        return tvm_ffi.structural_map(loop.body, (tirx.Var, lambda v: k if v.same_as(loop.loop_var) else v))

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, unroll)))


def passes() -> list[Any]:
    """The part of TVM's default S-TIR pipeline that CPU code without virtual threads, GPU memory or async copies needs.

    Left out on purpose: NarrowDataType (indices stay 64-bit), and passes whose time grows with the epilogues' expression
    trees without changing them (a module compiles in half the time).
    """
    return [
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.StorageRewrite(),
        unroll_steps,
        tirx.transform.ConvertSSA(),
        tirx.transform.UnrollLoop(),
        tirx.transform.StmtSimplify(),
        stream_loads,
        displace_moves,
        tirx.transform.RemoveNoOp(),
        s_tir.transform.RewriteUnsafeSelect(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
    ]


def moe_pipeline() -> tuple[Any, Any, Any]:
    _, host, device = default_s_tir_pipeline()

    @tvm.transform.module_pass(opt_level=0)
    def lower(mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        mod = tvm.ir.transform.Sequential(passes())(mod)
        functions = {}
        for name, func in mod.functions.items():
            if isinstance(func, tirx.PrimFunc):
                func = func.with_body(tvm_ffi.structural_map(func.body, (tirx.AllocBuffer, keep_on_stack)))
            functions[name] = func
        return tvm.IRModule(functions, attrs=mod.attrs)

    return lower, host, device


compilation_pipeline.register_tir_pipeline(PIPELINE, moe_pipeline)
