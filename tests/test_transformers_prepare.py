"""Whole models of every family: logits and greedy text with our experts against transformers' eager implementation."""

from __future__ import annotations

import copy

import pytest
import torch

from tests import roundings, tiny_models
from tests.helpers import Case, assert_matches_reference, assert_within, random_ids
from tests.tiny_models import MODELS, MORE

pytest.importorskip("transformers", minversion="5")

from tvm_moe.integrations.transformers import prepare_

PROMPTS, TOKENS = 12, 64
OTHER_ACTIVATIONS = {
    "gpt_oss": {"activation": "swigluoai", "alpha": 1.702, "limit": 0.5, "interleaved": True},
    "gemma4_text": {"activation": "gelu_tanh"},
}


@pytest.fixture(scope="module", params=[*MODELS, *MORE])
def models(request):
    """A model that runs eagerly, and its copy with packed experts."""
    eager = tiny_models.small(request.param, experts_implementation="eager")
    ours = copy.deepcopy(eager)
    report = prepare_(ours, progress=False)
    assert report.packed
    assert not report.left
    return request.param, eager, ours


@pytest.fixture(scope="module")
def texts(models):
    """Greedy continuations [B, T] of prompts of one token, of both."""
    _, eager, ours = models
    prompts = torch.arange(3, 3 + PROMPTS)[:, None]
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    return [model.generate(prompts, attention_mask=torch.ones_like(prompts), **options) for model in (eager, ours)]


@pytest.fixture(scope="module")
def spread(models, texts):
    return roundings.Spread(models[1], texts[0][:, :-1])


def test_logits_are_as_close_as_rounding_allows(models, texts, spread):
    """Ours, and transformers' own beside them, which shows that the bound is one."""
    _, _, ours = models
    got, _ = roundings.logits(ours, texts[0][:, :-1], spread.choices)
    assert_within(spread.rounded, spread.exact, spread.bound)
    assert_within(got, spread.exact, spread.bound)


def test_text_is_the_same_until_rounding_may_decide(texts, spread):
    eager, ours = (text[:, 1:] for text in texts)
    assert not spread.undecided.all()
    differs = (eager != ours) & ~spread.undecided
    assert not differs.any(), f"prompts and positions {differs.nonzero().tolist()}"


def test_every_layer_matches_the_reference(models):
    """The experts alone: tight enough to tell a wrong limit or the other gelu."""
    family, eager, ours = models
    rng = torch.Generator().manual_seed(4)
    for name, module in eager.named_modules():
        if not hasattr(module, "down_proj") or not isinstance(module.down_proj, torch.nn.Parameter):
            continue
        x = torch.randn(20, 32, generator=rng).bfloat16()
        packed = ours.get_submodule(name)
        if family == "llama4":
            check_llama4(eager.get_submodule(name.removesuffix(".experts")), packed, x)
            continue
        w13, w2, bias = module.gate_up_proj, module.down_proj, {}
        if family == "gpt_oss":
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
            bias = {"w13_bias": module.gate_up_proj_bias, "w2_bias": module.down_proj_bias}
        ids = random_ids(rng, 20, module.num_experts, 2)
        weights = torch.rand(20, 2, generator=rng).bfloat16()
        case = Case(x, w13, w2, weights, ids, {**OTHER_ACTIVATIONS.get(family, {}), **bias})
        assert_matches_reference(packed(x, ids.long(), weights), case)


def check_llama4(block, packed, x):
    """Its experts' one weight a token is on their input."""
    scores, _ = block.router(x)
    weights, ids = scores.max(-1, keepdim=True)
    w13, w2 = (w.transpose(1, 2) for w in (block.experts.gate_up_proj, block.experts.down_proj))
    case = Case(x, w13, w2, weights, ids.int(), on_input=True)
    assert_matches_reference(packed.tvm_moe_packed(x, weights, ids, True), case)
