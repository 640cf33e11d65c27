"""How tokens and results travel between the ranks of an `ExpertParallelMoE`.

An exchange takes x [T, H], weights f32 [T, k] and ids int32 [T, k], -1 where a slot is skipped; it gives f32 [T, H].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .rows import joined, parted

if TYPE_CHECKING:
    from .expert import ExpertParallelMoE

F32, I32 = torch.float32, torch.int32


def sums_of(layer: ExpertParallelMoE, rows: Tensor, sent: list[int], H: int, k: int, dtype: torch.dtype) -> Tensor:
    """f32 [n, H]: what each rank's experts make of ``rows``, x, weights and ids `joined`, of which it is sent its part."""
    group = layer.group
    received = group.announce(sent)
    arrived = parted(group.all_to_all(rows, sent, received), (H, dtype), (k, F32), (k, I32))
    return group.all_to_all(layer.sums(*arrived), received, sent)


def all_to_all(layer: ExpertParallelMoE, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A token is sent once to each rank that it needs, with all its ids; a sum comes back, to be added in rank order."""
    group, (T, k), H = layer.group, ids.shape, x.shape[1]
    owner = layer.owners[ids.long()]  # [T, k]; -1 finds the last entry
    needs = owner.new_zeros(T, group.size + 1, dtype=torch.bool).scatter_(1, owner, True)[:, :-1]
    _, token = torch.where(needs.T)
    sent = needs.sum(0).tolist()
    sums = sums_of(layer, joined(x[token], weights[token], ids[token]), sent, H, k, x.dtype)
    total = sums.new_zeros(T, H)
    for own, part in zip(token.split(sent), sums.split(sent), strict=True):
        total.index_add_(0, own, part)
    return total


def all_reduce(layer: ExpertParallelMoE, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Every rank gathers all tokens, and gets back the sums of its own: no rank has to find out which it needs.

    By all_to_all both ways: it takes any number of tokens a rank, and sums are added in rank order. gloo's own reduce_scatter
    (torch 2.13) takes equal numbers only, in an order of its own, and twice the time (2 ranks of 1024 tokens: 45 ms for 21).
    """
    size, (T, k), H = layer.group.size, ids.shape, x.shape[1]
    sums = sums_of(layer, joined(x, weights, ids).repeat(size, 1), [T] * size, H, k, x.dtype)
    total, *others = sums.view(size, T, H)
    for other in others:
        total += other
    return total


def replicated(layer: ExpertParallelMoE, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return layer.group.all_reduce(layer.sums(x, weights, ids))


Exchange = Callable[["ExpertParallelMoE", Tensor, Tensor, Tensor], Tensor]
EXCHANGES: dict[str, Exchange] = {"all_to_all": all_to_all, "all_reduce": all_reduce, "replicated": replicated}
