"""`tvm_moe.route` against its token-by-token definition: the same experts in the same order, always."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tvm_moe
from tests.helpers import U, assert_within
from tvm_moe import MoEError, reference
from tvm_moe.routing import SCORINGS

SCORING_NAMES = sorted(SCORINGS)


def assert_same_route(logits, top_k, **options):
    """Ids equal; weights within one rounding of a value that both sides know to f64 accuracy (1e-12 is generous)."""
    weights, ids = tvm_moe.route(logits, top_k, **options)
    want_weights, want_ids = reference.route(logits, top_k, **options)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    assert ids.tolist() == want_ids.tolist()
    assert_within(weights, want_weights, (2 * U + 1e-12) * want_weights.double().abs() + 2.0**-149)
    return weights, ids


def logits_of(kind, T, E, seed):
    rng = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(T, E, generator=rng)
    return {
        "f32": x,
        "bf16": x.bfloat16(),  # ties
        "coarse": x.round().half(),  # many ties, zeros of both signs
        "constant": torch.full((T, E), 0.3),
        "huge": x * 1e37,  # softmax underflows, sigmoid saturates
        "masked": torch.where(torch.rand(T, E, generator=rng) < 0.5, x, -math.inf),
    }[kind]


@settings(deadline=None, max_examples=250)
@given(data=st.data())
def test_equals_the_reference(data):
    groups = data.draw(st.sampled_from([1, 1, 2, 3, 4, 8]), "groups")
    size = data.draw(st.integers(2, 12), "size")
    kept = data.draw(st.integers(1, groups), "kept")
    k = data.draw(st.integers(1, kept * size), "k")
    T, E, seed = data.draw(st.integers(0, 6), "T"), groups * size, data.draw(st.integers(0, 2**31), "seed")
    logits = logits_of(data.draw(st.sampled_from(["f32", "bf16", "coarse", "constant", "huge", "masked"])), T, E, seed)
    rng = torch.Generator().manual_seed(seed + 1)
    bias = data.draw(st.sampled_from([None, torch.zeros(E), torch.randn(E, generator=rng).round(decimals=1)]), "bias")
    scale = data.draw(st.sampled_from([None, torch.rand(E, generator=rng)]), "per_expert_scale")
    assert_same_route(
        logits,
        k,
        scoring=data.draw(st.sampled_from(SCORING_NAMES), "scoring"),
        renormalize=data.draw(st.booleans(), "renormalize"),
        correction_bias=bias,
        num_groups=groups,
        topk_groups=kept,
        scaling_factor=data.draw(st.sampled_from([1.0, 2.5]), "scaling_factor"),
        per_expert_scale=scale,
    )


@pytest.mark.parametrize(("T", "E", "k"), [(0, 8, 2), (1, 1, 1), (1, 128, 8), (33, 72, 10), (300, 256, 8)])
@pytest.mark.parametrize("scoring", SCORING_NAMES)
def test_real_sizes(T, E, k, scoring):
    for kind in ("f32", "bf16"):
        assert_same_route(logits_of(kind, T, E, seed=T), k, scoring=scoring)


def test_deepseek_v3_size():
    rng = torch.Generator().manual_seed(0)
    bias = 0.1 * torch.randn(256, generator=rng)
    options = {"scoring": "sigmoid", "correction_bias": bias, "num_groups": 8, "topk_groups": 4, "scaling_factor": 2.5}
    weights, ids = assert_same_route(logits_of("bf16", 64, 256, seed=1), 8, **options)
    assert all(len({i // 32 for i in row}) <= 4 for row in ids.tolist())
    assert_within(weights.double().sum(-1), torch.full((64,), 2.5), 8 * U * 2.5)


def test_lower_index_wins_ties():
    _, ids = tvm_moe.route(torch.zeros(700, 300, dtype=torch.bfloat16), 9)
    assert ids.tolist() == [list(range(9))] * 700
    _, ids = tvm_moe.route(torch.tensor([[0.0, 2.0, -0.0, 2.0, 1.0]]), 4)
    assert ids.tolist() == [[1, 3, 4, 0]]


def test_groups_tie_to_the_lower_group():
    logits = torch.tensor([[1.0, 0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0]])
    assert tvm_moe.route(logits, 4, num_groups=4, topk_groups=2)[1].tolist() == [[2, 4, 3, 5]]


def test_group_score_is_the_maximum_without_bias_and_the_sum_of_two_with():
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])  # sigmoids: .95, .00 | .88, .88
    options = {"scoring": "sigmoid", "num_groups": 2, "topk_groups": 1}
    assert tvm_moe.route(logits, 1, **options)[1].tolist() == [[0]]
    assert tvm_moe.route(logits, 1, correction_bias=torch.zeros(4), **options)[1].tolist() == [[2]]


def test_masked_groups_lose_to_negative_choices_and_to_minus_infinity():
    bias = torch.tensor([-5.0, -5.0, -9.0, -9.0])  # every choice is negative: 0 for a masked one would win
    options = {"scoring": "sigmoid", "num_groups": 2, "topk_groups": 1}
    assert tvm_moe.route(torch.zeros(1, 4), 2, correction_bias=bias, **options)[1].tolist() == [[0, 1]]
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0]])
    assert tvm_moe.route(logits, 2, **options)[1].tolist() == [[3, 2]]


def test_bias_chooses_but_does_not_weigh():
    logits, bias = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1.0, 0.0, 0.0])
    weights, ids = tvm_moe.route(logits, 2, scoring="sigmoid", renormalize=False, correction_bias=bias)
    assert ids.tolist() == [[0, 2]]
    assert_within(weights, torch.sigmoid(logits.double())[:, [0, 2]], U)


def test_llama4_chooses_by_logit_where_the_sigmoid_saturates():
    weights, ids = tvm_moe.route(torch.tensor([[30.0, 40.0]]), 1, scoring="sigmoid", renormalize=False)
    assert ids.tolist() == [[1]]
    assert weights.tolist() == [[1.0]]


def test_zero_sum_gives_zero_weights():
    bias = torch.tensor([9.0, 9.0, 0.0])
    weights, ids = tvm_moe.route(torch.tensor([[-3e38, -3e38, 3e38]]), 2, correction_bias=bias)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_scaling_factor_and_per_expert_scale_multiply_after_normalising():
    logits, scale = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1.0, 3.0, 5.0])
    plain, ids = tvm_moe.route(logits, 2)
    scaled, _ = tvm_moe.route(logits, 2, scaling_factor=2.5, per_expert_scale=scale.bfloat16())
    assert_within(scaled, plain.double() * 2.5 * scale[ids.long()], 2 * U * scaled.double())


def test_ernie_divides_by_the_sum_or_its_minimum():
    """Both ways its docstring names: a sum above moe_norm_min, and one below it by a bias towards dead experts."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [-60.0, -60.5, 0.0, 0.0]])
    bias = torch.tensor([2.0, 2.0, 0.0, 0.0])
    options = {"top_k": 2, "scoring": "softmax", "correction_bias": bias}
    raw, ids = tvm_moe.route(logits, **options, renormalize=False)
    probabilities = logits.double().softmax(-1).gather(1, ids.long())
    want = probabilities / probabilities.sum(-1, keepdim=True).clamp(min=1e-12)
    assert_within(raw / raw.sum(-1, keepdim=True).clamp(min=1e-12), want, 4 * U * want)
    assert_within(tvm_moe.route(logits, **options)[0][:1], want[:1], 2 * U * want[:1] + 1e-20)


@pytest.mark.parametrize("scoring", SCORING_NAMES)
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 8)])
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_logits_give_valid_ids_and_nan_weights(scoring, bias, sign):
    nan = math.copysign(math.nan, sign)
    logits = torch.arange(24.0).view(3, 8)
    logits[1, 2] = logits[1, 5] = nan
    logits[2] = nan
    options = {"scoring": scoring, "correction_bias": bias, "num_groups": 4, "topk_groups": 2}
    weights, ids = assert_same_route(logits, 4, **options)
    assert all(len(set(row)) == 4 and set(row) <= set(range(8)) for row in ids.tolist())
    assert weights.isnan().any(-1).tolist() == [False, True, True]
    raw, _ = assert_same_route(logits, 4, renormalize=False, **options)
    assert raw.isnan().any(-1).tolist() == [False, True, True]


@pytest.mark.parametrize("scoring", SCORING_NAMES)
def test_a_token_does_not_depend_on_its_batch(scoring):
    """E is no multiple of any vector, so a token lies in the body of one call's vector loops and in another's tail."""
    logits, bias = logits_of("bf16", 101, 37, seed=5), torch.zeros(37)
    weights, ids = tvm_moe.route(logits, 6, scoring=scoring, correction_bias=bias)
    for t in range(101):
        weight, id_ = tvm_moe.route(logits[t : t + 1], 6, scoring=scoring, correction_bias=bias)
        assert torch.equal(weight[0], weights[t])
        assert torch.equal(id_[0], ids[t])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_read_as_f32(dtype):
    logits = logits_of("f32", 9, 16, seed=2).to(dtype)
    got, want = tvm_moe.route(logits, 3), tvm_moe.route(logits.float(), 3)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_strides_autograd_and_arguments():
    base = torch.randn(16, 40, generator=torch.Generator().manual_seed(3))
    logits = base.T[::2].requires_grad_()
    bias, scale = torch.zeros(16, requires_grad=True), torch.ones(16, requires_grad=True)
    before = [v.detach().clone() for v in (logits, bias, scale)]
    weights, _ = assert_same_route(logits, 4, scoring="sigmoid", correction_bias=bias, per_expert_scale=scale)
    assert not weights.requires_grad
    assert all(torch.equal(a, b) for a, b in zip((logits, bias, scale), before, strict=True))
    (weights.clone() * bias[:4]).sum().backward()  # usable as a constant of the caller's graph


L = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"router_logits": torch.zeros(8)}, r"router_logits.*\[T, E\].*\[8\]"),
        ({"router_logits": torch.zeros(1, 2, 8)}, "router_logits"),
        ({"router_logits": torch.zeros(2, 8, dtype=torch.int32)}, "router_logits.*int32"),
        ({"router_logits": torch.zeros(2, 8, device="meta")}, "router_logits.*meta"),
        ({"router_logits": torch.zeros(2, 0)}, "top_k"),
        ({"top_k": 0}, "top_k.*got 0"),
        ({"top_k": 9}, "top_k.*8.*got 9"),
        ({"scoring": "tanh"}, "scoring 'tanh'.*softmax"),
        ({"num_groups": 3}, "num_groups.*8.*got 3"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups.*4.*got 5"),
        ({"num_groups": 4, "topk_groups": 0}, "topk_groups"),
        ({"num_groups": 4, "topk_groups": 1, "top_k": 3}, "top_k is 3.*hold 2"),
        ({"num_groups": 8, "topk_groups": 4, "correction_bias": torch.zeros(8)}, "best two"),
        ({"correction_bias": torch.zeros(7)}, r"correction_bias.*\[8\].*\[7\]"),
        ({"correction_bias": torch.zeros(1, 8)}, "correction_bias"),
        ({"per_expert_scale": torch.zeros(2)}, r"per_expert_scale.*\[8\].*\[2\]"),
    ],
)
@pytest.mark.parametrize("route", [tvm_moe.route, reference.route])
def test_errors_say_what_is_wrong(route, arguments, message):
    with pytest.raises(MoEError, match=message):
        route(**({"router_logits": L, "top_k": 2} | arguments))
