"""The definition of routing: one token at a time, every step spelt out; `routing` computes the same for many at once.

Scores and weights are computed in f64 and rounded once to f32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .routing import check


@torch.no_grad()
def route(
    router_logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scaling_factor: float = 1.0,
    per_expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `tvm_moe.route` must return, token by token; its docstring explains the arguments and the choices."""
    check(router_logits, top_k, scoring, correction_bias, num_groups, topk_groups, per_expert_scale)
    T, E = router_logits.shape
    weights = torch.empty(T, top_k, dtype=torch.float32)
    ids = torch.empty(T, top_k, dtype=torch.int32)
    for t, logits in enumerate(router_logits.float()):
        score = _score(logits.double(), scoring)
        choice = logits if correction_bias is None else score.float() + correction_bias.float()
        best_of_group = 1 if correction_bias is None else 2
        worth = torch.stack([group[_largest(group, best_of_group)].sum() for group in choice.chunk(num_groups)])
        kept = _largest(worth, topk_groups)
        candidates = [e for e in range(E) if e // (E // num_groups) in kept]
        chosen = [candidates[i] for i in _largest(choice[candidates], top_k)]

        w = score[chosen]
        if scoring == "topk_softmax":
            w = _score(w, "softmax")
        elif renormalize:
            w = w / (w.sum() + 1e-20)
        w = w * scaling_factor
        if per_expert_scale is not None:
            w = w * per_expert_scale.double()[chosen]
        weights[t], ids[t] = w, torch.tensor(chosen)
    return weights, ids


def _score(x: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return (x - x.max()).exp() / (x - x.max()).exp().sum()
    if scoring == "sigmoid":
        return 1 / (1 + (-x).exp())
    if scoring == "sqrtsoftplus":
        return (x.clamp(min=0) + (-x.abs()).exp().log1p()).sqrt()  # softplus(x) = max(x, 0) + ln(1 + e^-|x|)
    return x


def _largest(values: Tensor, k: int) -> list[int]:
    """Indices of the k largest, NaN above all, the lower index first among equals (`sorted` is stable)."""
    v = values.tolist()
    return sorted(range(len(v)), key=lambda i: (True, 0.0) if math.isnan(v[i]) else (False, v[i]), reverse=True)[:k]
