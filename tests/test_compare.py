"""Distances, and the reference computed expert by expert."""

from __future__ import annotations

import pytest
import torch

import tvm_moe
from tvm_moe import checkpoint, reference
from tvm_moe.compare import distance, expected_outputs

from . import tiny_models
from .test_checkpoint_int8 import compress


def test_distance():
    expected = torch.eye(3)
    got = expected.clone()
    got[1, 1] = 1.5
    d = distance(got, expected)
    assert (d.worst_token, d.worst_error) == (1, 0.5)
    assert d.error == pytest.approx(0.5 / 3**0.5)
    assert d.cosine == pytest.approx(3.5 / (3 * 4.25) ** 0.5)
    got[2, 0] = float("nan")
    assert distance(got, expected).worst_token == 2
    assert distance(got, expected).error != distance(got, expected).error


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "int8"])
def test_expected_outputs_are_the_reference_expert_by_expert(name, tmp_path):
    tiny_models.make("qwen3_moe" if name == "int8" else name).save_pretrained(tmp_path)
    if name == "int8":
        compress(tmp_path)
    reader = checkpoint.open(tmp_path).layer(1)
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    weights, ids = tvm_moe.route(reader.router(hidden), **reader.routing)
    exact, rounded = expected_outputs(reader, hidden, weights, ids, reader.dtype)
    parts = [vars(expert) for expert in reader.experts()]
    whole = {key: None if parts[0][key] is None else torch.stack([part[key] for part in parts]) for key in parts[0]}
    w13, w2 = whole.pop("w13"), whole.pop("w2")
    torch.testing.assert_close(
        rounded, reference.fused_moe(hidden, w13, w2, weights, ids, **whole, **reader.options), rtol=1e-6, atol=1e-6
    )
    if name != "int8":
        f32 = reference.fused_moe(hidden, w13, w2, weights, ids, dtype="f32", **whole, **reader.options)
        torch.testing.assert_close(exact, f32, rtol=1e-6, atol=1e-6)
    assert 0 < distance(rounded, exact).error < 0.05
