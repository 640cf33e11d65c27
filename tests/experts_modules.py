"""Experts modules of transformers by themselves, calls of them, and what the reference gives for these."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.helpers import Case, random_ids

T, E, H, I, K = 40, 16, 24, 20, 4
# Every name under which a family looks these sizes up.
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), I),
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), H),
    **dict.fromkeys(("hidden_act", "hidden_activation"), "silu"),
    "moe_latent_size": None,
    "post_norm_eps": 1e-6,
}


def make(family: str = "qwen3_moe", name: str = "Qwen3MoeExperts", **config: Any) -> Any:
    """The bf16 experts class ``name`` of a family, with random parameters, running eagerly unless told otherwise."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    given = {"experts_implementation": "eager", **SIZES, **config}
    built = getattr(module, name)(transformers.PreTrainedConfig(**given)).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / H**0.5)
    return built.to(torch.bfloat16).eval()


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, H], ids and weights [T, K], as transformers passes them."""
    rng = torch.Generator().manual_seed(3)
    x, weights = torch.randn(T, H, generator=rng), torch.rand(T, K, generator=rng).softmax(-1)
    return x.to(dtype), random_ids(rng, T, E, K).long(), weights.to(dtype)


def case(module: Any, called: tuple[Tensor, Tensor, Tensor], dtype: str = "bf16", **activation: Any) -> Case:
    """What a call of a module that has not been packed yet is to give, whatever `read` finds in it."""
    x, ids, weights = called
    name = "up_proj" if activation.get("activation") == "relu2" else "gate_up_proj"
    w13, w2 = getattr(module, name).data.clone(), module.down_proj.data.clone()
    if getattr(module, "is_transposed", False):
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    options = {**activation, "dtype": dtype}
    if getattr(module, "has_bias", False):
        options |= {"w13_bias": getattr(module, f"{name}_bias").data, "w2_bias": module.down_proj_bias.data}
    return Case(x, w13, w2, weights, ids, options)
