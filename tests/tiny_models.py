"""Tiny seeded models of every supported type, saved by transformers' own save_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
QWEN = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {
    **MLA,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
GEMMA = {
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "head_dim": 8,
}
LOCAL = {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}

# name -> (config class, model class, what differs from BASE). gpt-oss is square (I = H): only a transposition that is
# really done can tell its down_proj from its transpose.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**QWEN, "head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**QWEN, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", LOCAL),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", LOCAL),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**QWEN, "intermediate_size": 24, "norm_topk_prob": False}),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2_lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**DEEPSEEK, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**LOCAL, "intermediate_size": 32, "swiglu_limit": 0.5}),
    "gemma4_text": ("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA),
}


# Those that the checkpoint reader does not read.
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {**DEEPSEEK, "head_dim": 8, "num_mtp_layers": 0}),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", LOCAL),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 40},
    ),
}


def make(name: str, **changes: Any) -> torch.nn.Module:
    """A bf16 model whose every parameter and buffer of the MoE layers is random (biases are zero by default)."""
    config_class, model_class, differs = (MODELS | MORE)[name]
    config = getattr(transformers, config_class)(**{**BASE, **differs, **changes})
    model = getattr(transformers, model_class)(config).to(torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.model.layers.parameters(), *model.model.layers.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model


def small(name: str, **changes: Any) -> torch.nn.Module:
    """A model to run: dense layers small, too, as many key as query heads where attention wants it, all of it seeded."""
    _, _, differs = (MODELS | MORE)[name]
    sizes = {"intermediate_size": 40, "global_head_dim": 8, "sliding_window": 32}
    if "kv_lora_rank" in differs:
        sizes["num_key_value_heads"] = BASE["num_attention_heads"]
    torch.manual_seed(0)
    model = make(name, **{k: v for k, v in sizes.items() if k not in differs}, attn_implementation="eager", **changes)
    return model.requires_grad_(False)


def rewrite(folder: Path, change: Any) -> None:
    """Passes the tensors of a single-file checkpoint, by name, through ``change(tensors) -> tensors``."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file)
