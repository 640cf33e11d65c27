"""Routing and reference against the routers and experts of HF transformers, the form our users' models come in."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

import tvm_moe
from tests.helpers import U_BF16, Case, U, assert_matches_reference, assert_within, random_ids
from tvm_moe import reference

pytest.importorskip("transformers", minversion="5")

T, E, H, I, K = 40, 16, 24, 20, 4
# Every name under which one of the families below looks these sizes up.
CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), K),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), I),
    **dict.fromkeys(("hidden_act", "hidden_activation"), "silu"),
    "hidden_size": H,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "moe_norm_min": 1e-12,
    "rms_norm_eps": 1e-6,
    "mlp_hidden_act": "relu2",
    "moe_latent_size": None,
    "swiglu_alpha": 1.702,
    "_experts_implementation": "eager",
}
GROUPS = {"num_groups": 4, "topk_groups": 2}


def build(family, name, dtype=torch.float32, **config):
    """The module ``name`` of a model family, with every parameter and buffer drawn at random."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with torch.device("cpu"):
        built = getattr(module, name)(SimpleNamespace(**CONFIG | config))
    rng = torch.Generator().manual_seed(1)
    for tensor in [*built.parameters(), *built.buffers()]:
        tensor.data = torch.randn(tensor.shape, generator=rng) / H**0.5
    return built.to(dtype).eval().requires_grad_(False)


def hidden(dtype):
    return torch.randn(T, H, generator=torch.Generator().manual_seed(2)).to(dtype)


def assert_same_routing(logits, weights, ids, top_k, choice_is_logits, **options):
    """The same experts but for equal logits, and weights within what f32 scores may err by."""
    ours, our_ids = tvm_moe.route(logits, top_k, **options)
    same = (our_ids.sort(-1).values == ids.sort(-1).values).all(-1)
    if choice_is_logits:
        assert torch.equal(logits.gather(1, our_ids.long()).sort(-1).values, logits.gather(1, ids).sort(-1).values)
    else:
        assert same.all()
    assert same.any()
    dense = [
        torch.zeros(logits.shape).scatter(1, i.long(), w.float())[same] for w, i in ((ours, our_ids), (weights, ids))
    ]
    # f32 softmax: rounding x - max (range * U), exp (4 U), a sum of E, a division; then a sum of k, a division and up
    # to two factors; on the peer's side, and our one rounding. A peer's bf16 weights add theirs.
    span = float(logits.max() - logits.min())
    relative = (2 * (span + E + 8) + top_k + 4) * U + (U_BF16 if weights.dtype == torch.bfloat16 else 0)
    assert_within(dense[1], dense[0], relative * dense[0].double().abs())


BOTH = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("family", "name", "config", "options"),
    [
        ("qwen3_moe", "Qwen3MoeTopKRouter", {}, {}),
        ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": False}, {"renormalize": False}),
        ("mixtral", "MixtralTopKRouter", {}, {}),
        ("gpt_oss", "GptOssTopKRouter", {}, {"scoring": "topk_softmax"}),
        ("granitemoe", "GraniteMoeTopKRouter", {}, {"scoring": "topk_softmax"}),
    ],
)
def test_routers_by_logits(family, name, config, options, dtype):
    logits, weights, ids = build(family, name, dtype, **config)(hidden(dtype))
    assert_same_routing(logits, weights, ids, K, True, **options)


@pytest.mark.parametrize(
    ("family", "name", "config", "options"),
    [
        ("deepseek_v2", "DeepseekV2TopkRouter", {"topk_method": "greedy"}, {"renormalize": False}),
        (
            "deepseek_v2",
            "DeepseekV2TopkRouter",
            {"topk_method": "group_limited_greedy"},
            {"renormalize": False, **GROUPS},
        ),
        ("deepseek_v3", "DeepseekV3TopkRouter", {}, {"scoring": "sigmoid", **GROUPS}),
        (
            "deepseek_v3",
            "DeepseekV3TopkRouter",
            {"norm_topk_prob": False},
            {"scoring": "sigmoid", "renormalize": False, **GROUPS},
        ),
        ("deepseek_v4", "DeepseekV4TopKRouter", {"scoring_func": "sqrtsoftplus"}, {"scoring": "sqrtsoftplus"}),
    ],
)
def test_routers_with_groups_bias_and_scaling(family, name, config, options):
    router = build(family, name, **config)
    bias = getattr(router, "e_score_correction_bias", None)
    logits, weights, ids = router(hidden(torch.float32))
    assert_same_routing(logits, weights, ids, K, False, correction_bias=bias, scaling_factor=2.5, **options)


def test_minimax_m2_router():
    router, bias = build("minimax_m2", "MiniMaxM2TopKRouter"), torch.linspace(-0.5, 0.5, E)
    logits, weights, ids = router(hidden(torch.float32), bias)
    assert_same_routing(logits, weights, ids, K, False, scoring="sigmoid", correction_bias=bias)


def test_ernie_router():
    router = build("ernie4_5_moe", "Ernie4_5_MoeTopKRouter")
    logits, weights, ids = router(hidden(torch.float32))
    bias = router.moe_statics.e_score_correction_bias.squeeze()
    assert_same_routing(logits, weights, ids, K, False, correction_bias=bias)


@pytest.mark.parametrize("dtype", BOTH)
def test_gemma4_router(dtype):
    router, logits = build("gemma4", "Gemma4TextRouter", dtype), []
    router.proj.register_forward_hook(lambda module, arguments, output: logits.append(output))
    _, weights, ids = router(hidden(dtype))
    assert_same_routing(logits[0], weights, ids, K, True, per_expert_scale=router.per_expert_scale)


@pytest.mark.parametrize(
    ("family", "name", "config", "options"),
    [
        ("qwen3_moe", "Qwen3MoeExperts", {}, {}),
        ("mixtral", "MixtralExperts", {}, {}),
        ("deepseek_v3", "DeepseekV3Experts", {}, {}),
        (
            "gemma4",
            "Gemma4TextExperts",
            {"hidden_activation": "gelu_pytorch_tanh"},
            {"activation": "gelu_pytorch_tanh"},
        ),
        ("deepseek_v4", "DeepseekV4Experts", {"swiglu_limit": 0.75}, {"limit": 0.75}),
        ("step3p7", "Step3p7Experts", {}, {"activation": "swiglustep", "limit": 0.75}),
        ("nemotron_h", "NemotronHExperts", {}, {"activation": "relu2"}),
        ("gpt_oss", "GptOssExperts", {"swiglu_limit": 7.0}, {"activation": "swigluoai"}),
        (
            "gpt_oss",
            "GptOssExperts",
            {"swiglu_limit": 0.75, "swiglu_alpha": 1.1},
            {"activation": "swigluoai", "alpha": 1.1, "limit": 0.75},
        ),
    ],
)
@pytest.mark.parametrize("dtype", BOTH)
def test_experts(family, name, config, options, dtype):
    experts = build(family, name, dtype, **config)
    if family == "step3p7":
        experts.limit = options["limit"]
    rng = torch.Generator().manual_seed(3)
    weights = torch.rand(T, K, generator=rng).softmax(-1).to(dtype)
    ids = random_ids(rng, T, E, K)
    got = experts(hidden(dtype), ids.long(), weights)

    w13, w2 = getattr(experts, "gate_up_proj", None), experts.down_proj
    if w13 is None:
        w13 = experts.up_proj
    options = options | {"dtype": "f32" if dtype == torch.float32 else "bf16"}
    if family == "gpt_oss":
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        options |= {"interleaved": True, "w13_bias": experts.gate_up_proj_bias, "w2_bias": experts.down_proj_bias}
    case = Case(hidden(dtype), w13, w2, weights, ids, options)
    assert_matches_reference(got, case, rounding=0.0 if dtype == torch.float32 else U_BF16)


def test_llama4_weighs_the_input():
    """Its experts get the input times the router's weight (0 where not chosen), and add up."""
    layer = build("llama4", "Llama4TextMoe", num_experts_per_tok=1)
    layer.shared_expert.down_proj.weight.zero_()
    x = hidden(torch.float32)
    got, logits = layer(x)
    weights, ids = tvm_moe.route(logits, 1, scoring="sigmoid", renormalize=False)
    w13, w2 = layer.experts.gate_up_proj.transpose(1, 2), layer.experts.down_proj.transpose(1, 2)
    assert_matches_reference(got, Case(x, w13, w2, weights, ids, {"dtype": "f32"}, on_input=True))
    weighed_after = reference.fused_moe(x, w13, w2, weights, ids, dtype="f32")
    assert (got - weighed_after).abs().max() > 1e-2
