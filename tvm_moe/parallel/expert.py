"""Expert parallelism: each rank holds some of the experts and calls with tokens of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import api
from ..errors import MoEError
from ..expert_weights import VECTORS
from ..experts import PackedExperts
from ..layers import Experts
from .exchange import EXCHANGES
from .group import Group, ProcessGroup, prepared, uncompiled


class ExpertParallelMoE(nn.Module):
    """`fused_moe` over the experts of all ranks, which call it together, with the same dtype and k.

    Called with this rank's hidden_states [T, H], topk_weights [T, k] and topk_ids [T, k]; gives [T, H] in the input's
    dtype, rounded once: results travel in f32. Ids count the experts of all ranks; those outside [0, num_experts) are
    skipped. T may differ from rank to rank and be 0. Inference only: no gradient is recorded.

    ``exchange`` (`EXCHANGES`):
        "all_to_all": tokens go to the ranks that hold a chosen expert, and the sum over each rank's experts comes back, to be
            added in rank order.
        "all_reduce": tokens go to all ranks: the better one where there are few ranks and each token needs most of them.
        "replicated": every rank calls with the same tokens and gets their results, by one all_reduce.

    Args:
        experts: this rank's, packed: number ``first`` and those after it; None for a rank that has none.
        num_experts: of all ranks. Ranks hold consecutive experts, in the order of ranks.
        group: of torch.distributed, for tensors on the CPU; None is the default group.

    Raises: MoEError, on every rank where the ranks' layers do not fit together, and where a rank is gone.
    """

    def __init__(
        self,
        experts: PackedExperts | None,
        first: int,
        num_experts: int,
        *,
        exchange: str = "all_to_all",
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.group = Group(group, f"ExpertParallelMoE ({exchange})")
        with self.group.together():
            if exchange not in EXCHANGES:
                raise MoEError(f"unknown exchange {exchange!r}; expected one of {', '.join(EXCHANGES)}")
        self.exchange, self.first, self.num_experts = exchange, first, num_experts
        self.experts = None if experts is None else Experts(experts)
        layer = {"layer": self.group.layer, "num_experts": num_experts}
        known = self.group.same(layer | ({} if experts is None else described(experts)))
        self.counts = holdings(self.group, first, 0 if experts is None else experts.num_experts, num_experts)
        self.hidden_size: int = known["hidden_size"]
        ranks = torch.arange(self.group.size + 1, device="cpu")
        self.owners = ranks.repeat_interleave(torch.tensor([*self.counts, 1], device="cpu"))  # the last: of skipped ids

    @classmethod
    def from_weights(
        cls,
        w13: Tensor,
        w2: Tensor,
        *,
        exchange: str = "all_to_all",
        group: ProcessGroup | None = None,
        **options: Any,
    ) -> ExpertParallelMoE:
        """Of the weights of all experts, [E, 2I, H] and [E, H, I], of which this rank packs its share alone.

        ``options``: the other arguments of `pack_experts`; scales and biases are those of all experts, too.
        """
        ranks = Group(group, cls.__name__)
        with ranks.together():
            api.check_weights(w13, w2)
            E = len(w13)
            for name in VECTORS:
                api.check_vector(name, options.get(name), E, w13.shape[1] if "13" in name else w13.shape[2])
            own = ranks.share(E)
            part = slice(own.start, own.stop)
            options |= {n: v[part] for n in VECTORS if (v := options.get(n)) is not None}
            experts = api.pack_experts(w13[part], w2[part], **options) if own else None
        return cls(experts, own.start, E, exchange=exchange, group=group)

    @uncompiled
    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, apply_router_weight_on_input: bool = False
    ) -> Tensor:
        x, weights = prepared(
            self.group, hidden_states, topk_weights, topk_ids, self.hidden_size, apply_router_weight_on_input,
            same_tokens=self.exchange == "replicated",
        )  # fmt: skip
        exists = (topk_ids >= 0) & (topk_ids < self.num_experts)
        ids = torch.where(exists, topk_ids, -1).int()
        return EXCHANGES[self.exchange](self, x, weights, ids).to(hidden_states.dtype)

    def sums(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """f32 [T, H]: each token's weighted sum over this rank's experts; all other ids are skipped."""
        if self.experts is None:
            return torch.zeros(x.shape, dtype=torch.float32, device="cpu")
        return self.experts(x.float(), weights, ids - self.first)

    def extra_repr(self) -> str:
        last = self.first + self.counts[self.group.rank]
        return (
            f"experts [{self.first}, {last}) of {self.num_experts}, rank {self.group.rank} of {self.group.size}, "
            f"exchange={self.exchange!r}"
        )


def described(experts: PackedExperts) -> dict[str, Any]:
    """What the parts of a layer have in common."""
    spec = experts.layer.activation
    return {
        "hidden_size": experts.hidden_size,
        "intermediate_size": experts.intermediate_size,
        "dtype": experts.dtype,
        "activation": (spec.name, spec.alpha, spec.limit),
    }


def holdings(group: Group, first: int, count: int, num_experts: int) -> list[int]:
    """How many experts each rank holds, if together they are all of them."""
    counts: list[int] = []
    for rank, (begin, held) in enumerate(group.gather((first, count))):
        if begin != sum(counts):
            raise MoEError(
                f"{group.layer}: the experts of rank {rank} begin at {begin}, those of the ranks before it end at "
                f"{sum(counts)}; ranks hold consecutive experts, in the order of ranks"
            )
        counts.append(held)
    if sum(counts) != num_experts:
        raise MoEError(f"{group.layer}: the ranks hold {counts} experts, expected {num_experts} of them together")
    return counts
