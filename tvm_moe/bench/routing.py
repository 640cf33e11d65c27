"""Which experts each token takes: uniform, skewed as in real models, or with one expert that every token picks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MoEError
from ..models import LayerShape

ROUTINGS = ("uniform", "zipf", "hot")
FLAT = "-flat"  # suffix: the same touched experts, with equal shares of the tokens
ZIPF_EXPONENT = 1.2


@dataclass(frozen=True)
class Workload:
    """What all sides are given at once: token count and routing; `draw` makes the routing of each call anew."""

    tokens: int
    routing: str

    @property
    def skewed(self) -> bool:
        return self.routing != "uniform" and not self.routing.endswith(FLAT)

    @property
    def flat(self) -> Workload:
        """The twin without skew: it touches the same experts in each call and computes as much."""
        return Workload(self.tokens, self.routing + FLAT)

    def hidden(self, shape: LayerShape) -> Tensor:
        """bf16 [T, H] of deviation 1, what a norm layer gives."""
        return torch.randn(self.tokens, shape.H, generator=torch.Generator().manual_seed(self.tokens)).bfloat16()

    def draw(self, shape: LayerShape, call: int) -> tuple[Tensor, Tensor]:
        """f32 weights and int32 ids, [T, k] each, of the ``call``-th call: the same in every process."""
        rng = torch.Generator().manual_seed(call)
        ids = draw(self.routing, self.tokens, shape.E, shape.k, rng)
        return torch.rand(self.tokens, shape.k, generator=rng).softmax(-1), ids


def check(routing: str) -> str:
    if routing not in ROUTINGS:
        raise MoEError(f"unknown routing {routing!r}; expected one of {', '.join(ROUTINGS)}")
    return routing


def draw(routing: str, tokens: int, experts: int, top_k: int, rng: torch.Generator) -> Tensor:
    """int32 [T, k], distinct in each token: sampling without replacement is top-k of log-probability + Gumbel noise."""
    base = routing.removesuffix(FLAT)
    gumbel = -torch.empty(tokens, experts).exponential_(generator=rng).log()
    ids = (gumbel + log_popularity(base, experts, rng)).topk(top_k).indices.to(torch.int32)
    return ids if routing == base else flattened(ids, rng)


def log_popularity(routing: str, experts: int, rng: torch.Generator) -> Tensor:
    """Unnormalized, [E]; which experts are the popular ones is drawn too."""
    if routing == "uniform":
        return torch.zeros(experts)
    rank = torch.randperm(experts, generator=rng)
    return torch.where(rank == 0, torch.inf, 0.0) if routing == "hot" else -ZIPF_EXPONENT * (rank + 1.0).log()


def flattened(ids: Tensor, rng: torch.Generator) -> Tensor:
    """As many slots over the same experts, shares equal to one slot; k consecutive of at least k experts are distinct."""
    touched = ids.unique()
    touched = touched[torch.randperm(len(touched), generator=rng)]
    return touched[torch.arange(ids.numel()) % len(touched)].reshape(ids.shape)
