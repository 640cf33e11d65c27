"""Llama 4: its experts take dense input, every token for every expert, so the whole MoE block is what to replace."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from . import experts, recipe
from .recipe import Recipe


class PackedLlama4TextMoe(Llama4TextMoe):
    """The block with packed experts: a token goes to its own expert alone, weighted on the input as in the original."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Output [T, H] and router logits [T, E] of hidden states [..., H]."""
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        weights, ids = scores.max(-1, keepdim=True)  # the others are sigmoid(-inf) = 0
        routed = getattr(self.experts, experts.PACKED)(x, weights, ids, True)
        return self.shared_expert(x) + routed, logits


ORIGINAL, PACKED = Llama4TextMoe, PackedLlama4TextMoe


def experts_of(block: Llama4TextMoe) -> Any:
    return block.experts


def read(block: Llama4TextMoe) -> Recipe | str:
    if block.top_k != 1:
        return f"it weights the inputs of {block.top_k} experts a token, which is only supported for one"
    module = block.experts

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * module.act_fn(gate)

    return recipe.fused(recipe.recipe(module, "gate_up_proj", apply, transposed=True, bias=False))
