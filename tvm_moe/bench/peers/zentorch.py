"""AMD's zentorch: `zentorch_fused_moe` in BF16 and, with weight scales, in W8A8 INT8."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ... import isa
from ...models import LayerShape
from .base import Adapter, activation

# Its gelu_tanh is computed with erf, as its gelu is.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


class Zentorch(Adapter):
    package = "zentorch"

    @classmethod
    def available(cls) -> tuple[bool, str]:
        if "avx512f" not in isa.features():
            return False, "needs AVX-512"
        return super().available()

    @classmethod
    def supports(cls, shape: LayerShape, dtype: str) -> tuple[bool, str]:
        return activation(shape, ACTIVATIONS)

    def start(self) -> None:
        importlib.import_module("zentorch")

    def build(self) -> dict[str, Tensor]:
        """Its first call repacks the weights in place; it must see two experts at least."""
        shape = self.source.shape
        layer = self.source.stacked(interleaved=shape.activation == "swigluoai")
        layer |= {name: layer[name].bfloat16() for name in ("w13_bias", "w2_bias") if name in layer}
        ids = torch.arange(shape.k, dtype=torch.int32).expand(4, -1).contiguous()
        self.run(layer, self.inputs(torch.zeros(4, shape.H, dtype=torch.bfloat16), torch.ones(4, shape.k), ids))
        return layer

    def inputs(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
        return hidden, weights, ids

    def run(self, layer: dict[str, Tensor], inputs: tuple[Any, ...]) -> Tensor:
        hidden, weights, ids = inputs
        out = torch.empty_like(hidden)
        torch.ops.zentorch.zentorch_fused_moe(
            out, hidden, layer["w13"], layer["w2"], layer.get("w13_bias"), layer.get("w2_bias"), weights, ids, False,
            self.source.shape.activation, layer.get("w13_scale"), layer.get("w2_scale"),
        )  # fmt: skip
        return out
