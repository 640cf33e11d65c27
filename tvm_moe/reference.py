"""The definition of the layer in plain torch: slow, exact where it can be, meant to be read.

A matrix product is exact for INT8, and otherwise summed in f64 and rounded once to f32: the f32 sums of the kernels
may differ from it by their own rounding errors, but not by the order in which this file happens to add.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .activations import ActivationSpec, resolve
from .errors import MoEError
from .reference_routing import route

__all__ = ["activate", "fused_moe", "quantize_rows", "quantize_weight", "route"]


def activate(g_u: Tensor, spec: ActivationSpec, interleaved: bool = False) -> Tensor:
    """f32 ``[..., 2I]`` to ``[..., I]``: gate half then up half, or alternating if ``interleaved`` (relu2: no gate).

    ``spec.limit`` is inf where there is none, which clamps nothing. torch.clamp passes NaN on.
    """
    if spec.name == "relu2":
        return torch.relu(g_u) ** 2
    g, u = (g_u[..., 0::2], g_u[..., 1::2]) if interleaved else g_u.chunk(2, dim=-1)
    # u comes last in each product: u * g could overflow where the activation of g is 0.
    if spec.name == "gelu":
        return 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) * u
    if spec.name == "gelu_tanh":
        return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    u = u.clamp(-spec.limit, spec.limit)
    if spec.name == "swiglustep":
        return (g / (1 + torch.exp(-g))).clamp(max=spec.limit) * u
    g = g.clamp(max=spec.limit)
    if spec.name == "swigluoai":
        return g / (1 + torch.exp(-spec.alpha * g)) * (u + 1)
    return g / (1 + torch.exp(-g)) * u  # silu


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations f32 ``[..., K]`` to int8 ``[..., K]`` and scale f32 ``[...]`` = max(absmax, 1e-7) / 127.

    A row with NaN or Inf gets scale NaN and zeros, so that everything computed from it is NaN.
    """
    scale = x.abs().amax(-1).clamp(min=1e-7) / 127
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    return _to_int8(x, scale), scale


def quantize_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[..., N, K]`` to int8 and scale f32 ``[..., N]`` = absmax / 127 per output row; 1 for a zero row."""
    w = w.float()
    scale = w.abs().amax(-1) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return _to_int8(w, scale), scale


def _to_int8(x: Tensor, scale: Tensor) -> Tensor:
    # torch.round rounds half to even.
    return torch.round(x / scale[..., None]).nan_to_num(0).clamp(-127, 127).to(torch.int8)


@torch.no_grad()
def fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
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
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """``y[t] = sum_j topk_weights[t, j] * expert[topk_ids[t, j]](hidden_states[t])``, ``[T, H]`` in the input's dtype.

    ``w13 [E, 2I, H]`` (relu2: ``[E, I, H]``) and ``w2 [E, H, I]`` are floating, or int8 with scales ``[E, N]`` or
    ``[E, N, 1]``; biases are ``[E, N]``; weights and ids of the routing ``[T, k]``. ``dtype`` says how operands of both
    products are rounded: "f32" not at all, "bf16" once each, "int8" per token and per output channel. None means
    "int8" for int8 weights, else "bf16". Ids outside [0, E) are skipped. Raises MoEError for what does not fit.
    """
    spec = resolve(activation, alpha, limit)
    dtype = _resolve_dtype(dtype, w13, w2, w13_scale, w2_scale)
    x, routing = hidden_states.float(), topk_weights.float()
    if apply_router_weight_on_input:
        if topk_ids.shape[1] != 1:
            raise MoEError(f"apply_router_weight_on_input needs one expert a token, got k={topk_ids.shape[1]}")
        x, routing = x * routing, torch.ones_like(routing)

    slots = torch.zeros(*topk_ids.shape, x.shape[1], dtype=torch.float32)
    for e in range(len(w13)):
        t, j = torch.where(topk_ids == e)
        if not len(t):
            continue
        h = _linear(x[t], w13[e], _row(w13_scale, e), _row(w13_bias, e), dtype)
        y = _linear(activate(h, spec, interleaved), w2[e], _row(w2_scale, e), _row(w2_bias, e), dtype)
        slots[t, j] = routing[t, j, None] * y

    out = torch.zeros_like(x)
    for slot in slots.unbind(1):
        out += slot
    return out.to(hidden_states.dtype)


def _linear(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: str) -> Tensor:
    """f32 ``[R, K]`` times ``[N, K]`` plus bias ``[N]``: f32 ``[R, N]``."""
    if dtype == "int8":
        w, scale = quantize_weight(w) if scale is None else (w, scale.float())
        q, x_scale = quantize_rows(x)
        y = _product(q, w) * (x_scale[:, None] * scale)
    elif dtype == "bf16":
        y = _product(x.bfloat16(), w.bfloat16())
    else:
        y = _product(x, w)
    return y if bias is None else y + bias.float()


def _product(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double().T).float()


def _row(per_expert: Tensor | None, e: int) -> Tensor | None:
    return None if per_expert is None else per_expert[e].flatten()


def _resolve_dtype(dtype: str | None, w13: Tensor, w2: Tensor, *scales: Tensor | None) -> str:
    quantized = w13.dtype == torch.int8
    if w2.dtype != w13.dtype or not (quantized or w13.is_floating_point()):
        raise MoEError(f"w13 and w2 must both be floating or both int8, got {w13.dtype} and {w2.dtype}; convert them")
    if any(quantized == (scale is None) for scale in scales):
        raise MoEError(f"int8 weights need both scales and floating weights none, got {w13.dtype}; see w13_scale")
    dtype = dtype or ("int8" if quantized else "bf16")
    if dtype not in ("f32", "bf16", "int8") or (quantized and dtype != "int8"):
        raise MoEError(
            f"dtype {dtype!r} for {w13.dtype} weights; expected f32, bf16 or int8, and int8 for int8 weights"
        )
    return dtype
