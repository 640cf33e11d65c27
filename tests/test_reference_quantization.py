"""Quantization to int8, per row of activations and per output channel of weights: what the traps give, exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.helpers import U, assert_within
from tvm_moe import reference


def test_rows_round_half_to_even():
    q, scale = reference.quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5]]))
    assert scale.tolist() == [1.0]
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -126, 126]]
    assert q.dtype == torch.int8


def test_rows_divide_and_do_not_multiply_by_a_reciprocal():
    """Values next to a rounding boundary that the reciprocal of the scale gets wrong."""
    x = torch.rand(200, 4000, generator=torch.Generator().manual_seed(0)) - 0.5
    scale = x.abs().amax(-1, keepdim=True) / 127
    x[:, 1:] = scale * (torch.round(x[:, 1:] / scale) + 0.5).clamp(-126.5, 126.5)
    x[:, 0] = 127 * scale[:, 0]
    q, got_scale = reference.quantize_rows(x)
    n, n_scale = x.numpy(), got_scale.numpy()[:, None]
    assert np.array_equal(q.numpy(), np.rint(n / n_scale))
    assert not np.array_equal(q.numpy(), np.rint(n * (np.float32(1) / n_scale)))


def test_zero_and_tiny_rows_use_the_floor():
    q, scale = reference.quantize_rows(torch.tensor([[0.0, 0.0], [5e-8, -1e-8]]))
    assert scale.tolist() == [float(np.float32(1e-7) / np.float32(127))] * 2
    assert q.tolist() == [[0, 0], [64, -13]]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_rows_with_nan_or_inf(bad):
    q, scale = reference.quantize_rows(torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 2.0]]))
    assert scale.isnan().tolist() == [True, False]
    assert q.tolist() == [[0, 0, 0], [64, 127, 127]]


def test_weights_per_output_channel():
    w = torch.tensor([[[1.0, -2.0], [0.0, 0.0]], [[0.5, 0.25], [-127.0, 2.5]]], dtype=torch.bfloat16)
    q, scale = reference.quantize_weight(w)
    assert q.tolist() == [[[64, -127], [0, 0]], [[127, 64], [-127, 2]]]
    assert_within(scale, torch.tensor([[2 / 127, 1.0], [0.5 / 127, 1.0]]), U)
