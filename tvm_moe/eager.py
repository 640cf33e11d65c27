"""The baseline: the expert loop of transformers' eager implementation, in bf16."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .activations import ActivationSpec, resolve
from .dense import GATES
from .errors import MoEError
from .experts import ExpertWeights


def to_bf16(expert: ExpertWeights) -> ExpertWeights:
    """The weights a model without quantized kernels would run: bf16, dequantized where they are int8."""
    w13, w2 = (w.bfloat16() for w in dequantize(expert))
    b13, b2 = (None if b is None else b.bfloat16() for b in (expert.w13_bias, expert.w2_bias))
    return ExpertWeights(w13, w2, w13_bias=b13, w2_bias=b2)


def dequantize(expert: ExpertWeights) -> tuple[Tensor, Tensor]:
    """``w13`` and ``w2`` as they are, or in f32 where they are int8."""
    pairs = (expert.w13, expert.w13_scale), (expert.w2, expert.w2_scale)
    w13, w2 = (w if scale is None else w.float() * scale[:, None] for w, scale in pairs)
    return w13, w2


def moe(
    hidden: Tensor,
    experts: Sequence[ExpertWeights],
    weights: Tensor,
    ids: Tensor,
    activation: str = "silu",
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
) -> Tensor:
    """``[T, H]`` in the dtype of ``hidden``: one gather, two products and one scatter an expert that is hit."""
    spec = resolve(activation, alpha, limit)
    out = torch.zeros_like(hidden)
    for e in ids.unique().tolist():
        token, slot = torch.where(ids == e)
        expert = experts[e]
        h = activate(functional.linear(hidden[token], expert.w13, expert.w13_bias), spec, interleaved)
        y = functional.linear(h, expert.w2, expert.w2_bias) * weights[token, slot, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def activate(gate_up: Tensor, spec: ActivationSpec, interleaved: bool) -> Tensor:
    """As the models write it, with torch's fused functions."""
    g, u = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    if spec.name not in (*GATES, "swigluoai"):
        raise MoEError(f"the eager baseline has no activation {spec.name!r}; expected one of {[*GATES, 'swigluoai']}")
    if math.isfinite(spec.limit):
        g, u = g.clamp(max=spec.limit), u.clamp(-spec.limit, spec.limit)
    return (u + 1) * (g * torch.sigmoid(g * spec.alpha)) if spec.name == "swigluoai" else GATES[spec.name](g) * u
