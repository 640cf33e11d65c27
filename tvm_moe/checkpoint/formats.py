"""The checkpoint formats this package reads: one row per model type, read by everything else in `checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

Config = Mapping[str, Any]

# The same number under the names that different models, and different releases of one writer, give it.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
TOP_K = ("num_experts_per_tok", "top_k_experts")
ACTIVATION = ("hidden_act", "hidden_activation")
LAYER_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers", "layers")


@dataclass(frozen=True)
class Format:
    """Names are relative to ``<prefix>.<layer>.<block>``; experts are at ``experts.<e>.<projection>.weight``, or fused.

    Fused tensors are ``experts.gate_up_proj [E, 2I, H]`` and ``experts.down_proj [E, H, I]``; ``transposed`` swaps
    the last two axes, ``interleaved`` alternates gate and up rows, ``bias`` adds ``*_bias [E, N]``.
    """

    model_type: str
    block: str = "mlp."
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # gate, up, down
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    intermediate: str = "moe_intermediate_size"
    activation: str | None = None  # None: the config names it
    alpha: str | None = None
    limit: str | None = None
    router: str = "gate"
    router_bias: bool = False
    router_scale: str | None = None  # the router reads rms_norm(x) * scale * H**-0.5
    scoring: str = "softmax"
    renormalize: bool = False  # where the config has no norm_topk_prob
    correction_bias: str | None = None
    per_expert_scale: str | None = None
    shared: str | None = None
    shared_gate: str | None = None


FORMATS = {
    f.model_type: f
    for f in (
        Format("qwen3_moe"),
        Format("qwen2_moe", shared="shared_expert", shared_gate="shared_expert_gate"),
        Format("olmoe", intermediate="intermediate_size"),
        Format(
            "mixtral",
            block="block_sparse_moe.",
            projections=("w1", "w3", "w2"),
            intermediate="intermediate_size",
            renormalize=True,
        ),
        Format(
            "minimax_m2",
            block="block_sparse_moe.",
            projections=("w1", "w3", "w2"),
            intermediate="intermediate_size",
            scoring="sigmoid",
            renormalize=True,
            correction_bias="e_score_correction_bias",
        ),
        Format("deepseek_v2", shared="shared_experts"),
        Format(
            "deepseek_v3",
            scoring="sigmoid",
            renormalize=True,
            correction_bias="gate.e_score_correction_bias",
            shared="shared_experts",
        ),
        Format(
            "gpt_oss",
            transposed=True,
            interleaved=True,
            bias=True,
            intermediate="intermediate_size",
            activation="swigluoai",
            alpha="swiglu_alpha",
            limit="swiglu_limit",
            router="router",
            router_bias=True,
            scoring="topk_softmax",
        ),
        Format(
            "gemma4_text",
            block="",
            router="router.proj",
            router_scale="router.scale",
            renormalize=True,
            per_expert_scale="router.per_expert_scale",
        ),
    )
}


def moe_layers(config: Config) -> list[int]:
    """Indices of the layers with experts: the others are dense by one of the rules models have for it."""
    if not config.get("enable_moe_block", True):
        return []
    first = config.get("first_k_dense_replace") or 0
    dense = config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step") or 1
    frequency = config.get("moe_layer_freq") or 1
    layers = range(first, config["num_hidden_layers"])
    return [i for i in layers if i not in dense and (i + 1) % step == 0 and i % frequency == 0]


def shared_size(config: Config) -> int:
    """Intermediate size of the shared expert (several are stored as one, side by side); 0 without one."""
    own = config.get("shared_expert_intermediate_size")
    return own if own is not None else (config.get("n_shared_experts") or 0) * config.get("moe_intermediate_size", 0)


def groups(config: Config) -> tuple[int, int]:
    """(number of expert groups, groups kept); DeepSeek-V2's "greedy" method ignores the groups its config may name."""
    if config.get("topk_method") == "greedy" or not config.get("n_group"):
        return 1, 1
    return config["n_group"], config.get("topk_group") or 1


def number(config: Config, *names: str) -> int:
    """The positive integer the config has under the first of ``names`` that is there."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {' or '.join(names)} is {value!r}, expected a positive integer")
    return value
