"""Tensor parallelism: each rank holds some columns of every expert's intermediate; all ranks call with the same tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from .. import activations, reference
from ..activations import ActivationSpec
from ..api import by_slots
from ..layers import Experts
from .group import Group, ProcessGroup, prepared, uncompiled
from .shard import Shard

ROWS = 256  # of the intermediate that are activated at a time, in cache


class TensorParallelMoE(nn.Module):
    """`fused_moe` with the intermediate size I cut into a shard a rank; made by `from_weights`.

    All ranks call it together, with the same hidden_states [T, H], topk_weights [T, k] and topk_ids [T, k]; each gets the
    same [T, H] in the input's dtype, rounded once: partial sums are added in f32. Inference only: no gradient is recorded.

    Operands are rounded as in one process. BF16 rounds the intermediate value by value. INT8 quantizes its rows by their
    maximum over all ranks, which takes another all_reduce, of one number a slot.

    Raises: MoEError, on every rank where the ranks' layers do not fit together, and where a rank is gone.
    """

    def __init__(self, shard: Experts | Int8Shard, hidden_size: int, group: Group) -> None:
        super().__init__()
        self.shard, self.hidden_size, self.group = shard, hidden_size, group

    @classmethod
    def from_weights(
        cls,
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
        sharded: bool = False,
        group: ProcessGroup | None = None,
    ) -> TensorParallelMoE:
        """Pack columns [r * I // n, (r + 1) * I // n) of the intermediate on rank r of n, for any I, smaller than n too.

        Arguments as of `pack_experts`, of the whole layer. ``sharded``: w13, w13_scale, w13_bias and w2 are this rank's
        already; w2_scale and w2_bias belong to whole rows, and are the same on all ranks.
        """
        vectors = {"w13_scale": w13_scale, "w2_scale": w2_scale, "w13_bias": w13_bias, "w2_bias": w2_bias}
        ranks = Group(group, cls.__name__)
        with ranks.together():
            spec = activations.resolve(activation, alpha, limit)
            parts, share = 2 if spec.gated else 1, range if sharded else ranks.share
            shard = Shard.cut(w13, w2, parts, interleaved, share, vectors)
            dtype = dtype or ("int8" if w13.dtype == torch.int8 else "bf16")
            peaks = shard.peaks() if dtype == "int8" and w2.is_floating_point() else None
        E, H, _ = w2.shape
        layer = {"num_experts": E, "hidden_size": H, "dtype": dtype, "quantized": w13.dtype == torch.int8}
        layer |= {"activation": (spec.name, spec.alpha, spec.limit), **{n: v is not None for n, v in vectors.items()}}
        ranks.same(layer)
        if peaks is not None:
            shard = shard.scaled(ranks.all_reduce(peaks, ReduceOp.MAX))
        if ranks.rank:
            shard = replace(shard, w2_bias=None)  # the first rank adds it
        with ranks.together():
            if dtype == "int8":
                gate_up, down = map(Experts, shard.pack_stages(isa))
                return cls(Int8Shard(gate_up, down, spec, ranks), H, ranks)
            return cls(Experts(shard.pack_layer(spec, dtype, isa)), H, ranks)

    @uncompiled
    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, apply_router_weight_on_input: bool = False
    ) -> Tensor:
        x, weights = prepared(
            self.group, hidden_states, topk_weights, topk_ids, self.hidden_size, apply_router_weight_on_input,
            same_tokens=True,
        )  # fmt: skip
        partial = self.shard(x.float(), weights, topk_ids)
        return self.group.all_reduce(partial).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"rank {self.group.rank} of {self.group.size}"


class Int8Shard(nn.Module):
    """A shard in two stages, with the maximum of each row of the intermediate over all ranks between them.

    The maximum is one more column of the second stage's input, with weight zero: the row is then quantized by it.
    """

    def __init__(self, gate_up: Experts, down: Experts, spec: ActivationSpec, group: Group) -> None:
        super().__init__()
        self.gate_up, self.down, self.spec, self.group = gate_up, down, spec, group

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """This rank's part of the result, f32 [T, H]: x f32 [T, H], weights f32 [T, k], ids [T, k].

        Every slot is a row between the stages; those that are skipped are zero.
        """
        ids, down = ids.contiguous(), self.down.serving()
        ones = weights.new_ones(ids.numel(), 1)
        gate_up = by_slots(x, self.gate_up.serving(), ones, ids.view(-1, 1))
        rows = weights.new_empty(ids.numel(), down.input_size)
        for part in range(0, len(rows), ROWS):
            own = rows[part : part + ROWS]
            own[:, :-1] = reference.activate(gate_up[part : part + ROWS], self.spec)
            own[:, -1] = own[:, :-1].abs().amax(1)
        # A NaN that this may lose is in its row all the same.
        rows[:, -1] = self.group.all_reduce(rows[:, -1].contiguous(), ReduceOp.MAX)
        return by_slots(rows, down, weights.contiguous(), ids)
