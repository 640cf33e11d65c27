"""Routing: from router logits to the k experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import MoEError
from .threads import fork_safe

# Score functions of float64 logits [T, E]. `logaddexp` is softplus without torch's cut-off at 20.
SCORINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.logaddexp(logits, torch.zeros_like(logits)).sqrt(),
    "topk_softmax": lambda logits: logits,
}


@fork_safe
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
    """Choose ``top_k`` experts for each token: (weights f32 ``[T, k]``, ids int32 ``[T, k]``), first choice first.

    ``router_logits`` is a floating CPU tensor ``[T, E]``, read as f32. The score of an expert is, by ``scoring``:
    "softmax" over E, "sigmoid", "sqrtsoftplus" (sqrt(ln(1 + e^x)), DeepSeek-V4) or, for "topk_softmax", its logit,
    with a softmax over the k chosen at the end (gpt-oss, Granite; sums to 1, so ``renormalize`` changes nothing).

    The choice is by score + ``correction_bias [E]`` in f32. Without a bias it is by the logits themselves: the same
    order for all four scorings, but never tied where a score underflows or saturates, so that Llama 4's "top-1 of the
    logits, weight sigmoid(logit)" is ``scoring="sigmoid", top_k=1, renormalize=False``. With ``num_groups`` > 1 only
    the experts of the best ``topk_groups`` groups of E / num_groups neighbours can be chosen; a group is worth its best
    expert (DeepSeek-V2), with a bias the sum of its best two (DeepSeek-V3). Among equals the lower index wins, always.

    Weights are the scores without bias; ``renormalize`` divides them by their sum + 1e-20, then ``scaling_factor`` and
    ``per_expert_scale[id]`` (``[E]``, Gemma 4) multiply. ERNIE-4.5's max(sum, moe_norm_min) is ``renormalize=True``
    as long as the sum is at least moe_norm_min (1e-12); to be exact beyond, pass False and divide the result.

    A NaN logit ranks above all numbers: its token gets valid, distinct ids and at least one NaN weight (all of them,
    where scores are normalised). Ids taken from a table (DeepSeek-V4's first layers) are the caller's; no routing
    happens. Arguments are not modified and no gradient is recorded. Raises MoEError for anything inconsistent.
    """
    if torch.compiler.is_compiling():
        from . import ops

        return ops.ROUTE(
            router_logits, top_k, scoring, renormalize, correction_bias, num_groups, topk_groups, scaling_factor,
            per_expert_scale,
        )  # fmt: skip
    check(router_logits, top_k, scoring, correction_bias, num_groups, topk_groups, per_expert_scale)
    logits = router_logits.float().contiguous()
    # Scores and weights are computed in f64 and rounded once: torch's f32 sigmoid and softplus differ in the last bit
    # between the body and the tail of a tensor, so a token's choice would depend on its batch, and ties would break.
    scores = SCORINGS[scoring](logits.double())
    choice = logits if correction_bias is None else scores.float() + correction_bias.float()
    ids = _choose(choice, top_k, num_groups, topk_groups, best_of_group=1 if correction_bias is None else 2)

    weights = scores.gather(1, ids)
    if scoring == "topk_softmax":
        weights = weights.softmax(-1)
    elif renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * scaling_factor
    if per_expert_scale is not None:
        weights = weights * per_expert_scale.double()[ids]
    return weights.float(), ids.int()


def _choose(choice: Tensor, k: int, num_groups: int, topk_groups: int, best_of_group: int) -> Tensor:
    """Ids int64 ``[T, k]`` of the largest of ``choice [T, E]`` among the experts of the best groups."""
    if topk_groups == num_groups:
        return _top(choice, k)
    grouped = choice.unflatten(1, (num_groups, -1))
    size = grouped.shape[2]
    kept = _top(grouped.topk(best_of_group).values.sum(-1), topk_groups).sort(-1).values
    # Only the experts of kept groups are looked at, in ascending order: no value stands for "masked", which an expert
    # of a kept group at -inf (or one with a negative choice against 0) could tie with or lose to.
    candidates = grouped.gather(1, kept[:, :, None].expand(-1, -1, size)).flatten(1)
    position = _top(candidates, k)
    return kept.gather(1, position // size) * size + position % size


def _top(values: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, the lower one first among equals; NaN counts as the largest.

    torch.topk leaves the order of equals open. The exact alternative, topk over int64 keys of value and index, takes
    32 us where this takes 12 (T = 1, E = 128, 2 cores of Zen 4), and saves 2 ms of a layer's hundreds for T = 1024.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def check(
    logits: Tensor,
    top_k: int,
    scoring: str,
    bias: Tensor | None,
    num_groups: int,
    topk_groups: int,
    per_expert_scale: Tensor | None,
) -> None:
    """Raise MoEError unless the arguments of ``route`` fit together."""
    if not isinstance(logits, Tensor):
        raise MoEError(f"router_logits must be a floating CPU tensor [T, E], got {type(logits).__name__}")
    if logits.dim() != 2 or not logits.is_floating_point() or logits.device.type != "cpu":
        got = f"{logits.dtype} {list(logits.shape)} on {logits.device}"
        raise MoEError(f"router_logits must be a floating CPU tensor [T, E], got {got}; flatten, convert or move it")
    E = logits.shape[1]
    if scoring not in SCORINGS:
        raise MoEError(f"unknown scoring {scoring!r}; expected one of {list(SCORINGS)}")
    if not isinstance(top_k, int) or not 1 <= top_k <= E:
        raise MoEError(f"top_k must be between 1 and the number of experts {E}, got {top_k}; lower top_k")
    if num_groups < 1 or E % num_groups:
        raise MoEError(f"num_groups must divide the {E} experts, got {num_groups}; num_groups=1 routes without groups")
    if not 1 <= topk_groups <= num_groups:
        raise MoEError(f"topk_groups must be between 1 and num_groups {num_groups}, got {topk_groups}; see the config")
    if top_k > topk_groups * E // num_groups:
        have = f"{topk_groups} of {num_groups} groups hold {topk_groups * E // num_groups} of {E} experts"
        raise MoEError(f"top_k is {top_k}, but {have}; raise topk_groups or lower top_k")
    if bias is not None and num_groups == E > 1:
        raise MoEError(f"a group is scored by its best two experts, got {num_groups} groups of one; use fewer groups")
    for name, value in (("correction_bias", bias), ("per_expert_scale", per_expert_scale)):
        if value is not None and (list(value.shape) != [E] or value.device.type != "cpu"):
            got = f"{list(value.shape)} on {value.device}"
            raise MoEError(f"{name} must be a CPU tensor [{E}], one value an expert, got {got}; reshape or move it")
