"""The bound that kernels are held to accepts the reference and rejects layers that are a little wrong."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tests.pairwise import pairwise
from tvm_moe import reference


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("options", ACTIVATION_OPTIONS, ids=str)
def test_the_bound_accepts_the_reference_and_rejects_wrong_layers(weights, options):
    if weights == "f32":
        options = options | {"dtype": "f32"}
    case = make_case(T=8, weights=weights, bias=True, **options)
    assert_matches_reference(case.reference(), case)
    wrong = {
        "no w13_bias": case.but(options={**case.options, "w13_bias": None}),
        "no w2_bias": case.but(options={**case.options, "w2_bias": None}),
        "rows shifted": case.but(w13=case.w13.roll(1, 1)),
        "other expert": case.but(ids=(case.ids + 1) % 4),
        "slots swapped": case.but(weights=case.weights.flip(1)),
        "last column lost": case.but(w2=torch.cat([case.w2[..., :-1], 0 * case.w2[..., :1]], -1)),
    }
    if "limit" in options:
        wrong["limit ignored"] = case.but(options=case.options | {"limit": 1e9})
    assert [what for what, layer in wrong.items() if matches(layer.reference(), case)] == []


def test_the_bound_knows_where_the_intermediate_is_rounded(monkeypatch):
    """Not rounding it in BF16, or rounding it to bf16 before it is quantized in INT8, must show."""
    bf16 = make_case(T=64, H=48, I=40, x_dtype=torch.float32)
    unrounded = bf16.but(x=bf16.x.bfloat16().float(), options={"dtype": "f32"})
    assert not matches(unrounded.reference(), bf16)

    int8 = make_case(T=64, H=48, I=40, weights="int8", x_dtype=torch.float32)
    activate = reference.activate
    with monkeypatch.context() as patch:
        patch.setattr(reference, "activate", lambda *a: activate(*a).bfloat16().float())
        rounded_twice = int8.reference()
    assert not matches(rounded_twice, int8)


def matches(got, case):
    try:
        assert_matches_reference(got, case)
    except AssertionError:
        return False
    return True


def test_pairwise_holds_every_pair_in_few_rows():
    factors = {"a": range(7), "b": range(7), "c": "xyz", "d": [True, False], "e": range(8)}
    rows = pairwise(**factors)
    assert rows == pairwise(**factors)
    for one, two in combinations(factors, 2):
        assert {(r[one], r[two]) for r in rows} == set(product(factors[one], factors[two]))
    assert 56 <= len(rows) < 70  # 56 is the least possible, 2352 would be all combinations
