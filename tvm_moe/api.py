"""The two calls of a model: `pack_experts` once, `fused_moe` per layer and step."""

from __future__ import annotations

from typing import Any

import torch

from . import activations, runtime
from .errors import MoEError
from .experts import ExpertWeights, PackedExperts
from .integrations import torchao
from .plan import Field
from .threads import fork_safe, forked, get_num_threads

Tensor = torch.Tensor
KNOWN_CALLS = 4096  # kinds remembered by a layer
IO_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@fork_safe
def pack_experts(
    w13: Tensor,
    w2: Tensor,
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    dtype: str | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    isa: str | None = None,
) -> PackedExperts:
    """Pack a layer's experts for the kernel that will read them; the caller's tensors are not changed or kept.

    Args:
        w13: gate and up projections [E, 2I, H], any strides ([E, I, H] for relu2). Gate rows first, then up rows;
            ``interleaved=True``: even rows gate, odd rows up. bf16, f16 or f32; int8 with ``w13_scale``, or torchao's
            Int8Tensor, which brings its own.
        w2: down projections [E, H, I], any strides.
        w13_scale, w2_scale: per-channel scales [E, N] or [E, N, 1] of int8 weights.
        w13_bias, w2_bias: [E, N], added in f32.
        dtype: None keeps what comes in: int8 weights -> "int8", others -> "bf16". "int8" quantizes per channel.
        activation, alpha, limit: see `activations.ACTIVATIONS`.
        isa: CPU level; None is the best this CPU executes (``TVM_MOE_ISA`` caps it), a name demands that one.

    Raises:
        MoEError: shapes, dtypes or devices that do not fit; UnsupportedISAError: a level this CPU lacks.
    """
    w13, w13_scale = taken_apart("w13", w13, w13_scale)
    w2, w2_scale = taken_apart("w2", w2, w2_scale)
    check_weights(w13, w2)
    E, N, H = w13.shape
    I = w2.shape[2]
    vectors = {"w13_scale": w13_scale, "w2_scale": w2_scale, "w13_bias": w13_bias, "w2_bias": w2_bias}
    for name, vector in vectors.items():
        check_vector(name, vector, E, N if name.startswith("w13") else H)
    if dtype is None:
        dtype = "int8" if w13.dtype == torch.int8 else "bf16"

    def expert(e: int) -> ExpertWeights:
        return ExpertWeights(w13[e], w2[e], **{n: None if v is None else v[e] for n, v in vectors.items()})

    return PackedExperts.from_experts(
        map(expert, range(E)), E, H, I, dtype=dtype, activation=activation, alpha=alpha, limit=limit,
        interleaved=interleaved, isa=isa, batch=E,
    )  # fmt: skip


@fork_safe
def pack_linear(
    w: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: str | None = None,
    isa: str | None = None,
) -> PackedExperts:
    """One matrix an expert, [E, N, K], any strides: `fused_moe` then gives [T, N] of hidden_states [T, K].

    ``y[t] = sum_j topk_weights[t, j] * (x[t] @ w[topk_ids[t, j]].T + bias[topk_ids[t, j]])``: for experts whose activation
    is not among ours, which takes its place between two of these. Other arguments and errors as of `pack_experts`.
    """
    w, scale = taken_apart("w", w, scale)
    if not isinstance(w, Tensor) or w.ndim != 3 or sparse(w):
        raise MoEError(f"w must be a dense 3-D torch tensor [E, N, K], got {described(w)}")
    E, N, K = w.shape
    check_vector("scale", scale, E, N)
    check_vector("bias", bias, E, N)

    def expert(e: int) -> ExpertWeights:
        return ExpertWeights.linear(w[e], *(None if v is None else v[e] for v in (scale, bias)))

    return PackedExperts.from_experts(
        map(expert, range(E)), E, N, K, dtype=dtype or ("int8" if w.dtype == torch.int8 else "bf16"),
        activation=activations.NONE, isa=isa, batch=E,
    )  # fmt: skip


def taken_apart(name: str, w: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """torchao's int8 tensors as weights and scales, all others as they are."""
    if not torchao.is_quantized(w) or scale is not None:
        return w, scale
    found = torchao.parts(w, name)
    if isinstance(found, str):
        raise MoEError(f"{found}; dequantize it first")
    return found


def check_weights(w13: Tensor, w2: Tensor) -> None:
    for name, w in (("w13", w13), ("w2", w2)):
        if not isinstance(w, Tensor) or w.ndim != 3 or sparse(w):
            raise MoEError(f"{name} must be a dense 3-D torch tensor ([E, 2I, H], [E, H, I]), got {described(w)}")
    if w13.shape[0] != w2.shape[0] or w13.shape[2] != w2.shape[1]:
        raise MoEError(
            f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} disagree: expected [E, 2I, H] and [E, H, I] with the same "
            f"E and H (transposed weights: pass .transpose(1, 2), no copy is made)"
        )
    if (w13.dtype == torch.int8) != (w2.dtype == torch.int8):
        raise MoEError(f"w13 is {w13.dtype} and w2 is {w2.dtype}; both or none must be int8")


def check_vector(name: str, vector: Tensor | None, E: int, N: int) -> None:
    if vector is None:
        return
    if not isinstance(vector, Tensor) or tuple(vector.shape) not in ((E, N), (E, N, 1)):
        got = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
        raise MoEError(f"{name} has shape {got}, expected ({E}, {N}) or ({E}, {N}, 1)")
    if vector.device.type != "cpu" or not vector.is_floating_point():
        raise MoEError(f"{name} must be a floating tensor on the CPU, got {vector.dtype} on {vector.device}")
    if "scale" in name and not torch.isfinite(vector).all():
        raise MoEError(f"{name} holds NaN or Inf; check the checkpoint")


def fused_moe(
    hidden_states: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``y[t] = sum_j topk_weights[t, j] * expert_{topk_ids[t, j]}(hidden_states[t])``, summed in f32 in slot order.

    Args:
        hidden_states: [T, H] bf16, f16 or f32, any strides.
        topk_weights: [T, k] floating; topk_ids: [T, k] int32 or int64, any strides. Ids outside [0, E) are skipped.
        apply_router_weight_on_input: multiply the input by the weight instead of the output (k = 1 only).
        out: where to write, [T, H] of hidden_states' dtype; may not overlap the inputs or itself.

    Returns: [T, H] of hidden_states' dtype (``out`` if given). Inference only: no gradient is recorded.

    Raises: MoEError where shapes, dtypes, devices or overlap do not fit; nothing has been written then.
    """
    arguments = hidden_states, experts, topk_weights, topk_ids, apply_router_weight_on_input
    if torch.compiler.is_compiling():
        return recorded(*arguments, out)
    served = known_call(*arguments) if out is None else None
    if served is not None:
        return served
    return recorded(*arguments, out) if under_a_mode() else checked_call(*arguments, out)


def recorded(
    x: Tensor, experts: PackedExperts, weights: Tensor, ids: Tensor, on_input: bool, out: Tensor | None
) -> Tensor:
    """The call as torch.compile, torch.export and whatever else follows operators record it."""
    from . import ops

    if not isinstance(experts, PackedExperts):
        check_call(x, experts, weights, ids, on_input)
    if out is not None:
        check_out_kind(out, experts.hidden_size, x)
        if any(out is tensor for tensor in (x, weights, ids)):
            raise MoEError("out is one of the inputs; pass a tensor of its own")
    result = ops.call(x, experts, weights, ids, on_input)
    return result if out is None else out.copy_(result)


def under_a_mode() -> bool:
    """Whether something follows every operator (`make_fx`, FakeTensorMode): it would not see a call of a module."""
    return torch._C._len_torch_dispatch_stack() > 0


def known_call(x: Tensor, experts: PackedExperts, weights: Tensor, ids: Tensor, on_input: bool) -> Tensor | None:
    """The result where a call of this kind has passed all checks and needed no conversion; None: not known.

    Between two layers of a model this code has left the caches, and then every line of Python costs: of the 700 us that a
    layer's one token takes, a checked call took 180 and this one 90 (21 and 11 when repeated at once).
    """
    if forked() or under_a_mode():  # torch operations need `fork_safe` in a forked child
        return None
    try:
        if not type(x) is type(weights) is type(ids) is Tensor or x.is_neg() or weights.is_neg():
            return None
        plan = experts.layer.known.get(kind_of_call(x, weights, ids, on_input, get_num_threads()))
        if plan is None or not (x.is_cpu and weights.is_cpu and ids.is_cpu):
            return None
        out = torch.empty_like(x)
        if type(out) is not Tensor:  # under a mode that traces
            return None
        if weights.dtype is not torch.float32:
            weights = weights.float()
        addresses = x.data_ptr(), out.data_ptr(), weights.data_ptr(), ids.data_ptr()
    except (AttributeError, AssertionError, RuntimeError, TypeError):  # no plain tensors: the checks say what is wrong
        return None
    if not all(addresses):  # wrapped: no memory
        return None
    runtime.call(experts.layer.module, plan, *addresses)
    return out


def kind_of_call(x: Tensor, weights: Tensor, ids: Tensor, on_input: bool, threads: int) -> tuple[Any, ...]:
    """All that the checks and the plan depend on, but for the device."""
    return (
        x.dtype, x.shape, x.stride(), weights.dtype, weights.shape, weights.stride(), ids.dtype, ids.shape, ids.stride(),
        on_input, threads,
    )  # fmt: skip


@fork_safe
def checked_call(
    hidden_states: Tensor, experts: PackedExperts, topk_weights: Tensor, topk_ids: Tensor, on_input: bool,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Any call: checked, converted where the module cannot read or write it, remembered where nothing was converted."""
    check_call(hidden_states, experts, topk_weights, topk_ids, on_input)
    if out is not None:
        check_out(out, experts.hidden_size, hidden_states, topk_weights, topk_ids)
    # The device is named because a caller may have made another one the default.
    shape = (len(hidden_states), experts.hidden_size)
    result = torch.empty(shape, dtype=hidden_states.dtype, device="cpu") if out is None else out
    if topk_ids.numel() == 0:
        return result.zero_()
    x = prepared(hidden_states)
    direct = result.dtype == x.dtype and (result.stride(1) == 1 or result.shape[1] == 1)
    target = result if direct else torch.empty(shape, dtype=x.dtype, device="cpu")
    weights = topk_weights if topk_weights.dtype == torch.float32 else topk_weights.detach().float()
    if weights.is_neg():
        weights = weights.resolve_neg()
    weights, ids = weights.contiguous(), topk_ids.contiguous()
    plan = experts.layer.run(x, target, weights, ids, on_input)
    converted = x is not hidden_states or ids is not topk_ids or not topk_weights.is_contiguous()
    if not converted and x.is_contiguous() and not experts.layer.sizes.linear:
        if len(experts.layer.known) >= KNOWN_CALLS:
            experts.layer.known.clear()
        experts.layer.known[kind_of_call(x, topk_weights, ids, on_input, plan[Field.THREADS])] = plan
    return result if direct else result.copy_(target)


@fork_safe
def by_slots(x: Tensor, experts: PackedExperts, weights: Tensor, ids: Tensor) -> Tensor:
    """`fused_moe` of x f32 [R, K], whose rows serve T * k / R consecutive slots each: f32 [T, H].

    One id a slot, ids [R * k, 1]: the slots' results apart. As many rows as slots, R = T * k: each slot has its own input.
    weights f32 [T, k] and ids [T, k] contiguous; nothing is checked.
    """
    x = prepared(x)
    out = torch.empty((len(ids), experts.hidden_size), dtype=torch.float32, device="cpu")
    if ids.numel() == 0:
        return out.zero_()
    experts.layer.run(x, out, weights, ids)
    return out


def prepared(x: Tensor) -> Tensor:
    """``x`` as the module reads it: rows contiguous, f16 widened to f32 (exact; the f32 result is rounded to f16 once)."""
    if x.is_neg():  # a lazy minus sign, which the memory does not show
        x = x.detach().resolve_neg()
    if x.dtype == torch.float16:
        x = x.detach().float()
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.detach().contiguous()


def check_call(x: Tensor, experts: PackedExperts, weights: Tensor, ids: Tensor, on_input: bool) -> None:
    """What, got, expected. One pass of cheap comparisons: this runs at every call."""
    if torch.jit.is_tracing():
        raise MoEError("fused_moe cannot be traced: torch.jit.trace would record nothing of it; call it eagerly")
    if not isinstance(on_input, bool):
        raise MoEError(f"apply_router_weight_on_input must be True or False, got {on_input!r}")
    if not isinstance(experts, PackedExperts):
        raise MoEError(f"experts must be PackedExperts (from pack_experts), got {type(experts).__name__}")
    check_tensors(x, weights, ids, experts.input_size, on_input)
    if on_input and experts.layer.sizes.linear:
        raise MoEError("apply_router_weight_on_input is not for what pack_linear made; multiply hidden_states yourself")


def check_tensors(x: Tensor, weights: Tensor, ids: Tensor, columns: int, on_input: bool) -> None:
    """Of a call of experts that take `columns` columns."""
    for name, tensor in (("hidden_states", x), ("topk_weights", weights), ("topk_ids", ids)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 2 or tensor.device.type != "cpu" or sparse(tensor):
            raise MoEError(f"{name} must be a dense 2-D torch tensor on the CPU, got {described(tensor)}")
    if x.dtype not in IO_DTYPES:
        raise MoEError(f"hidden_states is {x.dtype}; expected bfloat16, float16 or float32")
    if not weights.dtype.is_floating_point:
        raise MoEError(f"topk_weights is {weights.dtype}; expected a floating dtype")
    if ids.dtype not in (torch.int32, torch.int64):
        raise MoEError(f"topk_ids is {ids.dtype}; expected int32 or int64")
    T, H = x.shape
    if columns != H:
        raise MoEError(f"hidden_states has {H} columns, these experts have hidden size {columns}")
    if ids.shape[0] != T or weights.shape != ids.shape:
        raise MoEError(
            f"topk_weights {tuple(weights.shape)} and topk_ids {tuple(ids.shape)} must both be [T, k] with T = {T}"
        )
    k = ids.shape[1]
    if on_input and k != 1:
        raise MoEError(f"apply_router_weight_on_input needs k = 1, got k = {k}")
    if T * k >= 2**31:
        raise MoEError(f"T * k = {T * k} slots; at most 2^31 - 1 fit one call: split the tokens")


def check_out_kind(out: Tensor, columns: int, x: Tensor) -> None:
    shape = (len(x), columns)
    if not isinstance(out, Tensor) or out.shape != shape or out.dtype != x.dtype or out.device != x.device:
        got = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise MoEError(f"out is {got}, expected {shape} {x.dtype} on the CPU")


def check_out(out: Tensor, columns: int, *inputs: Tensor) -> None:
    check_out_kind(out, columns, inputs[0])
    if out.is_neg() or sparse(out):
        raise MoEError("out is a negated view or sparse; pass a plain dense tensor")
    if out.requires_grad:
        raise MoEError("out requires grad; this is inference only: pass a detached tensor")
    if overlaps_itself(out):
        raise MoEError(f"out overlaps itself in memory (strides {out.stride()}); pass a tensor that is not expanded")
    low, high = extent(out)
    for name, tensor in zip(("hidden_states", "topk_weights", "topk_ids"), inputs, strict=True):
        first, last = extent(tensor)
        if out.numel() and tensor.numel() and low < last and first < high:
            raise MoEError(f"out overlaps {name} in memory; pass a tensor of its own")


def sparse(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided


def described(value: object) -> str:
    """A wrong argument in a few words."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"shape {tuple(value.shape)}, {value.layout}, on {value.device}"


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte a tensor touches."""
    first = tensor.data_ptr()
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first, first + span * tensor.element_size()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory, as in an expanded tensor."""
    span = 1
    for stride, n in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < span:
            return True
        span += (n - 1) * stride
    return False
