"""Step 3.7: its experts are called like all others, but their class does not ask for other implementations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from . import experts, recipe
from .recipe import Recipe


class PackedStep3p7Experts(Step3p7Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts.forward(self, hidden_states, top_k_index, top_k_weights)


ORIGINAL, PACKED = Step3p7Experts, PackedStep3p7Experts


def experts_of(module: Step3p7Experts) -> Any:
    return module


def read(module: Step3p7Experts) -> Recipe | str:
    if recipe.dispatched(module):  # in another version of transformers
        return recipe.read(module)
    return recipe.fused(recipe.recipe(module, "gate_up_proj", module._apply_gate, transposed=False, bias=False))
