"""What plain torch offers: slots sorted by expert and two `torch._grouped_mm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...activations import resolve
from ...eager import activate
from ...models import LayerShape
from .base import Adapter


class TorchGrouped(Adapter):
    package = "torch"

    @classmethod
    def supports(cls, shape: LayerShape, dtype: str) -> tuple[bool, str]:
        return hasattr(torch, "_grouped_mm"), "this torch has no _grouped_mm"

    def build(self) -> dict[str, Tensor]:
        layer = self.source.stacked()
        return layer | {n: layer[n].bfloat16() for n in ("w13_bias", "w2_bias") if n in layer}

    def inputs(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
        return hidden, weights, ids.long()

    def run(self, layer: dict[str, Tensor], inputs: tuple[Any, ...]) -> Tensor:
        hidden, weights, ids = inputs
        k = ids.shape[1]
        experts, order = ids.flatten().sort()
        ends = functional.one_hot(ids.flatten(), self.source.shape.E).sum(0).cumsum(0).int()
        h = torch._grouped_mm(hidden[order // k], layer["w13"].transpose(1, 2), offs=ends)
        if "w13_bias" in layer:
            h += layer["w13_bias"][experts]
        h = activate(h, resolve(self.source.shape.activation), False).bfloat16()
        y = torch._grouped_mm(h, layer["w2"].transpose(1, 2), offs=ends)
        if "w2_bias" in layer:
            y += layer["w2_bias"][experts]
        slots = torch.empty_like(y)
        slots[order] = y
        return (slots.unflatten(0, ids.shape) * weights[..., None]).sum(1).to(hidden.dtype)
