"""The main job: run every MoE layer of a checkpoint, compare it with the reference and with eager torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tvm_moe

from . import eager
from .checkpoint import Checkpoint, LayerReader
from .compare import Distance, distance, expected_outputs
from .models import LayerShape

# Bounds of the distance between a layer and the reference that rounds the same operands in the same places, bf16 or
# int8. What remains: the output is rounded to bf16, at most 2^-8 of each element. And f32 sums in another order move
# a few values of the intermediate across a rounding boundary, by one step: 2^-7 of the value in bf16, 1/127 of the
# row's largest in int8. These are rare, one in about 2^10, which leaves the norm over all tokens to the output's
# rounding; in a single token one may be the largest value there is: 2^-8 + 2^-7 < 2^-6.
NORM_BOUND, TOKEN_BOUND = 2.0**-8, 2.0**-6


@dataclass(frozen=True)
class LayerResult:
    """One line of the report. ``accuracy`` is of the whole layer against f32, so it has the cost of the number format
    in it; ``deviation`` is of the routed experts against the reference in ``dtype``, and is what is bounded."""

    layer: int
    dtype: str
    isa: str
    tokens: int
    accuracy: Distance
    deviation: Distance
    milliseconds: float
    eager_milliseconds: float
    gops: float
    gigabytes_per_second: float

    @property
    def passed(self) -> bool:
        return self.deviation.error <= NORM_BOUND and self.deviation.worst_error <= TOKEN_BOUND


def run(
    opened: Checkpoint,
    layers: Sequence[int] | None = None,
    *,
    dtype: str | None = None,
    tokens: int = 64,
    isa: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[LayerResult]:
    """Results layer by layer; ``progress(layer, expert)`` is called for every expert packed."""
    for index in opened.layers if layers is None else layers:
        yield run_layer(opened.layer(index), dtype, tokens, isa, progress)


def run_layer(
    reader: LayerReader,
    dtype: str | None = None,
    tokens: int = 64,
    isa: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LayerResult:
    """Seeded hidden states of deviation 1 (what a norm layer gives) through the layer's own router and experts."""
    generator = torch.Generator().manual_seed(reader.index)
    hidden = torch.randn(tokens, reader.hidden_size, generator=generator).bfloat16()
    weights, ids = tvm_moe.route(reader.router(hidden), **reader.routing)
    experts = reader.pack(dtype, isa, None if progress is None else partial(progress, reader.index))

    def fused() -> Tensor:
        return tvm_moe.fused_moe(hidden, experts, weights, ids)

    exact, rounded = expected_outputs(reader, hidden, weights, ids, experts.dtype)
    got = whole = fused()
    if reader.has_shared_experts:
        whole, exact = got + reader.shared_expert(hidden), exact + reader.shared_expert(hidden.float())
    baseline = [eager.to_bf16(expert) for expert in reader.experts()]
    seconds, eager_seconds = median_seconds(fused, lambda: eager.moe(hidden, baseline, weights, ids, **reader.options))
    traffic = experts.nbytes * len(ids.unique()) / reader.num_experts + 2 * hidden.nbytes
    return LayerResult(
        layer=reader.index,
        dtype=experts.dtype,
        isa=experts.isa,
        tokens=tokens,
        accuracy=distance(whole, exact),
        deviation=distance(got, rounded),
        milliseconds=seconds * 1e3,
        eager_milliseconds=eager_seconds * 1e3,
        gops=shape(reader).operations(tokens) / seconds / 1e9,
        gigabytes_per_second=traffic / seconds / 1e9,
    )


def shape(reader: LayerReader) -> LayerShape:
    return LayerShape("", reader.hidden_size, reader.intermediate_size, reader.num_experts, reader.top_k)


def median_seconds(*calls: Callable[[], Any], least: float = 0.3, most: float = 2.0) -> list[float]:
    """Of each call, over at least five rounds, until each has taken ``least`` seconds or all of them ``most``.

    A round runs all of them: they meet the same load of the machine, and none finds its own weights still cached.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    while len(times[0]) < 5 or (min(map(sum, times)) < least and sum(map(sum, times)) < most):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]
