"""The eager baseline computes the layer that it is timed for."""

from __future__ import annotations

import pytest
import torch

from tvm_moe import MoEError, activations, checkpoint, eager

from .helpers import make_case


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"limit": 0.5},
        {"activation": "gelu"},
        {"activation": "gelu_tanh", "interleaved": True},
        {"activation": "swigluoai", "limit": 0.5, "interleaved": True, "bias": True},
    ],
)
def test_eager_baseline_computes_the_layer(options):
    case = make_case(T=9, weights="f32", x_dtype=torch.float32, dtype="f32", **options)
    names = ("w13_bias", "w2_bias")
    experts = [
        checkpoint.ExpertWeights(case.w13[e], case.w2[e], **{n: case.options[n][e] for n in names if n in case.options})
        for e in range(len(case.w13))
    ]
    keys = ("activation", "alpha", "limit", "interleaved")
    picked = {key: case.options[key] for key in keys if key in case.options}
    got = eager.moe(case.x, experts, case.weights, case.ids, **picked)
    torch.testing.assert_close(got, case.reference())


def test_eager_baseline_refuses_what_it_lacks():
    with pytest.raises(MoEError, match="has no activation 'relu2'"):
        eager.activate(torch.zeros(1, 2), activations.resolve("relu2"), False)
