"""Activations of experts modules: recognised by what they compute, and run as they are where they are not ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import assert_matches_reference, assert_within
from tvm_moe import SlowPathWarning, reference, threads

pytest.importorskip("transformers", minversion="5")

from tests import experts_modules
from tests.experts_modules import E, H, I, K, T, case, inputs
from tvm_moe.integrations.transformers import prepare_
from tvm_moe.integrations.transformers.swapped import read

GELU_TANH = {"activation": "gelu_tanh"}
SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
# Family, class, config, and what it is: keyword arguments of `pack_experts`.
KNOWN = [
    ("qwen3_moe", "Qwen3MoeExperts", {}, {"activation": "silu"}),
    ("qwen3_moe", "Qwen3MoeExperts", {"hidden_act": "gelu"}, {"activation": "gelu"}),
    ("qwen3_moe", "Qwen3MoeExperts", {"hidden_act": "gelu_new"}, GELU_TANH),
    ("gemma4", "Gemma4TextExperts", {"hidden_activation": "gelu_pytorch_tanh"}, GELU_TANH),
    ("aria", "AriaExperts", {}, {"activation": "silu"}),
    ("beam", "BeamExperts", {}, {"activation": "silu"}),
    ("deepseek_v4", "DeepseekV4Experts", {"swiglu_limit": 0.75}, {"activation": "silu", "limit": 0.75}),
    ("hy_v4", "HYV4Experts", {"swiglu_limit": 10.0}, {"activation": "silu", "limit": 10.0}),
    ("glm5_next", "Glm5NextTextExperts", {"swiglu_limit": 0.3}, {"activation": "silu", "limit": 0.3}),
    ("step3p7", "Step3p7Experts", {}, {"activation": "silu"}),
    ("nemotron_h", "NemotronHExperts", {"mlp_hidden_act": "relu2"}, {"activation": "relu2"}),
    (
        "gpt_oss",
        "GptOssExperts",
        {"swiglu_limit": 0.75, "swiglu_alpha": 1.1},
        {"activation": "swigluoai", "alpha": 1.1, "limit": 0.75, "interleaved": True},
    ),
    (
        "openai_privacy_filter",
        "OpenAIPrivacyFilterExperts",
        SWIGLU,
        {"activation": "swigluoai", "alpha": 1.702, "limit": 7.0},
    ),
    ("minimax_m3_vl", "MiniMaxM3VLExperts", SWIGLU, {"activation": "swigluoai", "alpha": 1.702, "limit": 7.0}),
]
IDS = [f"{family}-{'-'.join(map(str, what.values()))}" for family, _, _, what in KNOWN]
known = pytest.mark.parametrize(("family", "name", "config", "what"), KNOWN, ids=IDS)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Slow paths are said once per process; here, once per test."""
    monkeypatch.setattr(threads, "_said", set())


@known
def test_activations_are_recognised_by_what_they_compute(family, name, config, what):
    assert read(experts_modules.make(family, name, **config)).activation == {"interleaved": False} | what


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@known
def test_a_packed_module_computes_the_layer(family, name, config, what, dtype):
    module, called = experts_modules.make(family, name, **config), inputs()
    expected = case(module, called, dtype, **what)
    report = prepare_(module, dtype)
    assert [(layer.dtype, layer.not_fused) for layer in report.packed] == [(dtype, "")]
    assert_matches_reference(module(*called), expected)


def test_a_clamp_after_the_activation_is_told_from_one_before():
    module = experts_modules.make("step3p7", "Step3p7Experts")
    module.limit = 0.75
    assert read(module).activation == {"activation": "swiglustep", "limit": 0.75, "interleaved": False}


@pytest.mark.parametrize(
    "gate",
    [
        lambda gate, up: torch.sigmoid(1.702 * gate) * gate * up,  # quick_gelu
        lambda gate, up: nn.functional.silu(up) * gate,  # the halves swapped
        lambda gate, up: nn.functional.silu(gate) * up.clamp(max=1000.0),  # far from where values usually are
        lambda gate, up: nn.functional.silu(gate) * (up + 1e-3),
    ],
)
def test_what_is_almost_ours_is_not_ours(monkeypatch, gate):
    module = experts_modules.make()
    monkeypatch.setattr(type(module), "_apply_gate", lambda self, gate_up: gate(*gate_up.chunk(2, -1)))
    found = read(module)
    assert found.activation is None
    assert found.reason == "its activation is none of ours"


def test_a_gate_that_cannot_be_tried_out_is_not_ours(monkeypatch):
    module, weight = experts_modules.make(), torch.eye(2 * I, dtype=torch.bfloat16)
    monkeypatch.setattr(type(module), "_apply_gate", lambda self, gate_up: (gate_up @ weight)[:, :I])
    assert "cannot be tried out in float32" in read(module).reason


def foreign(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(1.702 * gate) * up


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_foreign_gate_runs_between_our_products(monkeypatch, dtype):
    """In f32 hidden states, whose intermediate results are not rounded beside the operands of the products."""
    module, (x, ids, weights) = experts_modules.make(), inputs(torch.float32)
    monkeypatch.setattr(type(module), "_apply_gate", lambda self, gate_up: foreign(gate_up))
    ids[0, 1], ids[1, 0] = E, -1
    expected = case(module, (x, ids, weights), dtype)
    with pytest.warns(SlowPathWarning, match="experts are not fused: its activation is none of ours"):
        report = prepare_(module, dtype)
    assert (report.packed[0].dtype, report.packed[0].not_fused) == (dtype, "its activation is none of ours")
    assert "its own activation" in str(report)
    monkeypatch.setattr(reference, "activate", lambda g_u, spec, interleaved: foreign(g_u))
    assert_matches_reference(module(x, ids, weights), expected)


def test_a_norm_of_every_experts_output_runs_as_it_is():
    module, (x, ids, weights) = experts_modules.make("muse_spark", "MuseSparkExperts"), inputs(torch.float32)
    norm = module.post_expert_norm = nn.LayerNorm(H, eps=1e-2).requires_grad_(False)
    norm.bias.fill_(1)  # also of nothing, which must not show where an expert was skipped
    ids[0, 1] = E
    one, w13, w2 = torch.ones(T, 1), module.gate_up_proj.data.clone(), module.down_proj.data.clone()
    slots = [norm(reference.fused_moe(x, w13, w2, one, ids[:, j : j + 1], dtype="bf16")) for j in range(K)]
    want = sum(weights[:, j, None] * slot.masked_fill(ids[:, j, None] == E, 0) for j, slot in enumerate(slots))
    with pytest.warns(SlowPathWarning, match="it normalizes every expert's output"):
        prepare_(module)
    assert module.post_expert_norm is norm
    # A value of the intermediate may round to its neighbour, 2^-8 of one of I terms; the norm scales all alike.
    assert_within(module(x, ids, weights), want, 2.0**-8 * want.abs().max())
