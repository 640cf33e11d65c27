"""Is what a side computes right? A few tokens of a timed call against the reference in f32.

The bound is on the relative error norm. A side may be away from f32 by what its number format costs (`noise`: the distance
of the reference that rounds operands to that format; twice that where it quantizes otherwise than our definition), and by
a bf16 rounding, 2^-8, at every other place where it stores a result in bf16 (`Adapter.roundings`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compare
from ..experts import ExpertWeights
from .layers import Source
from .routing import Workload

ROUNDING = 2.0**-8  # unit roundoff of bf16


@dataclass(frozen=True)
class Check:
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN


@dataclass(frozen=True)
class Expected:
    """The output of some tokens, f32 [n, H], and the distance that the number format puts between it and any side."""

    exact: Tensor
    noise: float

    def check(self, got: Tensor, noise_factor: float, roundings: int) -> Check:
        error = compare.distance(got, self.exact).error
        return Check(error, noise_factor * self.noise + roundings * ROUNDING)


class Touched:
    """The experts some tokens take, renumbered: what `compare.expected_outputs` reads, and no others are made."""

    def __init__(self, source: Source, ids: Tensor) -> None:
        self.source = source
        self.touched, self.ids = ids.unique(return_inverse=True)
        self.options = source.options

    def experts(self) -> Iterator[ExpertWeights]:
        return map(self.source.expert, self.touched.tolist())


def sampled_tokens(tokens: int, count: int = 4) -> list[int]:
    """Evenly from first to last: tails of blocks are among them."""
    return sorted({round(i * (tokens - 1) / (count - 1)) for i in range(count)})


def expected(source: Source, workload: Workload, call: int) -> Expected:
    """Of the sampled tokens in the ``call``-th call."""
    tokens = sampled_tokens(workload.tokens)
    weights, ids = (v[tokens] for v in workload.draw(source.shape, call))
    reader: Any = Touched(source, ids)
    hidden = workload.hidden(source.shape)[tokens]
    exact, rounded = compare.expected_outputs(reader, hidden, weights, reader.ids, source.dtype)
    return Expected(exact, compare.distance(rounded, exact).error)


def touched_experts(source: Source, workload: Workload, calls: int) -> float:
    """How many experts a call reads, mean over calls 1 to ``calls``."""
    counts = [len(workload.draw(source.shape, i)[1].unique()) for i in range(1, calls + 1)]
    return torch.tensor(counts, dtype=torch.float64).mean().item()
