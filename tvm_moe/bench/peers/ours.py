"""This package."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import tvm_moe

from ...experts import PackedExperts
from .base import Adapter


class Ours(Adapter):
    package = "tvm_moe"
    roundings = 1  # of the output; operands are rounded as the reference of the number format rounds them
    noise_factor = 1

    def build(self) -> PackedExperts:
        shape = self.source.shape
        return PackedExperts.from_experts(
            self.source.experts(), shape.E, shape.H, shape.I, dtype=self.source.dtype, isa=self.isa,
            **self.source.options,
        )  # fmt: skip

    def inputs(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
        return hidden, weights, ids

    def run(self, layer: PackedExperts, inputs: tuple[Any, ...]) -> Tensor:
        hidden, weights, ids = inputs
        return tvm_moe.fused_moe(hidden, layer, weights, ids)
