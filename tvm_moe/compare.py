"""How far the output of a layer is from what it should be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from .checkpoint import LayerReader
from .eager import dequantize


@dataclass(frozen=True)
class Distance:
    """Of ``[T, H]`` from what was expected: relative error norm, cosine, and the token with the largest error norm."""

    error: float
    cosine: float
    worst_token: int
    worst_error: float


def distance(got: Tensor, expected: Tensor) -> Distance:
    """NaN anywhere gives NaN, and the token that has it is the worst one."""
    got, expected = got.double(), expected.double()
    tokens = (got - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    worst = int(tokens.argmax())  # argmax takes NaN for the largest
    error = (got - expected).norm() / expected.norm().clamp(min=1e-30)
    cosine = torch.cosine_similarity(got.flatten(), expected.flatten(), dim=0, eps=1e-30)
    return Distance(float(error), float(cosine), worst, float(tokens[worst]))


def expected_outputs(
    reader: LayerReader, hidden: Tensor, weights: Tensor, ids: Tensor, dtype: str
) -> tuple[Tensor, Tensor]:
    """The routed experts by the reference, f32 ``[T, H]`` each: computed in f32, and with the roundings of ``dtype``.

    One expert at a time, so that a layer which fits memory once can be checked. The sum over experts then runs in
    expert order, not in slot order: k f32 additions, far below any rounding to ``dtype``.
    """
    exact, rounded = torch.zeros(2, *hidden.shape)
    for e, expert in enumerate(reader.experts()):
        token = torch.where((ids == e).any(1))[0]
        if len(token) == 0:
            continue
        routed = hidden[token].float(), weights[token], torch.where(ids[token] == e, 0, -1)
        kept = {name: getattr(expert, name) for name in ("w13_bias", "w2_bias", "w13_scale", "w2_scale")}
        kept = {name: value[None] for name, value in kept.items() if value is not None}
        biases = {name: value for name, value in kept.items() if name.endswith("bias")}
        w13, w2 = (w[None] for w in dequantize(expert))
        exact[token] += _reference(routed, w13, w2, dtype="f32", **biases, **reader.options)
        rounded[token] += _reference(routed, expert.w13[None], expert.w2[None], dtype=dtype, **kept, **reader.options)
    return exact, rounded


def _reference(routed: tuple[Tensor, Tensor, Tensor], w13: Tensor, w2: Tensor, **options: object) -> Tensor:
    hidden, weights, ids = routed
    return reference.fused_moe(hidden, w13, w2, weights, ids, **options)  # type: ignore[arg-type]
