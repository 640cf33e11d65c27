"""Experts whose activation is not among ours: our two grouped products, and the module's own function between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...experts import PackedExperts
from ...layers import Experts


class Unfused(nn.Module):
    """Two of what `pack_linear` makes, [E, 2I, H] and [E, H, I]; what is in between belongs to the module around it."""

    def __init__(self, gate_up: PackedExperts, down: PackedExperts) -> None:
        super().__init__()
        self.gate_up, self.down = Experts(gate_up), Experts(down)

    def forward(self, owner: Any, hidden_states: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Tensor:
        """[T, H] in the dtype of ``hidden_states``; intermediate results have it, too, as in transformers.

        Every (token, expert) pair is a row of its own: [T * k, ...]. Skipped pairs give rows of zeros.
        """
        T, k = top_k_index.shape
        ids = top_k_index.reshape(-1, 1)
        one = torch.ones_like(ids, dtype=torch.float32)
        h = self.gate_up(hidden_states.repeat_interleave(k, 0), one, ids)
        h = owner._apply_gate(h) if owner.has_gate else owner.act_fn(h)
        y = self.down(h, one, ids)
        if owner.has_post_expert_norm:
            y = owner.post_expert_norm(y)
        y = y.float() * top_k_weights.reshape(-1, 1).float()
        skipped = (ids < 0) | (ids >= owner.num_experts)
        return y.masked_fill(skipped, 0).view(T, k, -1).sum(1).to(hidden_states.dtype)
