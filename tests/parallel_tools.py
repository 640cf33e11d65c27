"""What the cases of test_parallel are made of: how a layer is made and called, and how results are compared."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import Case, U, _activate, _linear, assert_within
from tvm_moe import MoEError
from tvm_moe.parallel import ExpertParallelMoE, TensorParallelMoE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = (5, 0, 9, 1)  # of each rank
KINDS = ExpertParallelMoE, TensorParallelMoE


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def layer(kind: Any, case: Case, **options: Any) -> nn.Module:
    return kind.from_weights(case.w13, case.w2, **case.options, **options)


def call(module: nn.Module, case: Case) -> Tensor:
    return module(case.x, case.weights, case.ids, case.on_input)


def part(case: Case, begin: int, count: int) -> Case:
    some = slice(begin, begin + count)
    return case.but(x=case.x[some], weights=case.weights[some], ids=case.ids[some])


def skipping(case: Case) -> Case:
    """Some slots name no expert, and their weights are NaN; a token has no other slots."""
    case.ids[0, 0], case.ids[-1, -1], case.ids[3] = -1, len(case.w13), 2**31 - 1
    outside = (case.ids < 0) | (case.ids >= len(case.w13))
    return case.but(weights=case.weights.masked_fill(outside, math.nan))


def equal(got: Tensor, want: Tensor) -> None:
    """Bit for bit, NaN and the sign of zero included."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = {2: torch.int16, 4: torch.int32}[want.element_size()]
    differ = (got.view(bits) != want.view(bits)).nonzero()
    assert not len(differ), f"{len(differ)} differ, first at {differ[0].tolist()}"


def near(got: Tensor, want: Tensor, bound: Tensor) -> None:
    """Within a bound of f32 sums, both rounded to the output's dtype."""
    ulp = 0 if got.dtype == F32 else torch.finfo(got.dtype).eps
    assert_within(got, want, bound + ulp * (want.double().abs() + bound) + torch.finfo(got.dtype).tiny)


def magnitudes(case: Case) -> Tensor:
    """f64 [T, H]: the weighted magnitudes of all that is added up for an element, with a step of INT8's intermediate."""
    total = torch.zeros(case.x.shape, dtype=torch.float64)
    for e in range(len(case.w13)):
        t, j = torch.where(case.ids == e)
        if not len(t):
            continue
        w = case.weights[t, j, None]
        x = case.x[t].float() * w if case.on_input else case.x[t].float()
        h, d = _activate(case, *_linear(case, x, torch.zeros_like(x).double(), "w13", e, 0.0), 0.0)
        step = h.abs().amax(1, keepdim=True) / 127 if case.dtype == "int8" else 2**-8 * h.abs()
        scale, bias = (case.options.get(f"w2_{kind}") for kind in ("scale", "bias"))
        y = (h.abs() + d + step) @ case.w2[e].double().abs().T * (1 if scale is None else scale[e].double())
        y = y if bias is None else y + bias[e].double().abs()
        total.index_add_(0, t, y if case.on_input else w.double().abs() * y)
    return total


def order_bound(case: Case, terms: int) -> Tensor:
    """Two sums of so many terms in f32, each in an order of its own, then of the slots: the worst case on both sides."""
    return 2 * (terms + case.ids.shape[1] + 4) * U * magnitudes(case)


def raises(message: str, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(MoEError, match=re.escape(message)):
        function(*args, **options)
