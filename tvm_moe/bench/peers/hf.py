"""HF transformers' own experts modules, as a model runs them: Qwen3-MoE's, and gpt-oss's for swigluoai."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...activations import resolve
from ...models import LayerShape
from .base import Adapter, activation

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swigluoai": ""}


class Grouped(Adapter):
    package = "transformers"
    roundings = 7  # its router weights are bf16 too
    implementation: ClassVar[str] = "grouped_mm"

    @classmethod
    def supports(cls, shape: LayerShape, dtype: str) -> tuple[bool, str]:
        if shape.bias != (shape.activation == "swigluoai"):
            return False, "has biases with swigluoai and only there"
        return activation(shape, ACTIVATIONS)

    def build(self) -> torch.nn.Module:
        shape = self.source.shape
        layer = self.source.stacked(interleaved=shape.bias)
        if shape.bias:
            layer["w13"], layer["w2"] = (layer[name].transpose(1, 2).contiguous() for name in ("w13", "w2"))
        with torch.device("meta"):
            module = self.module()
        fields = {
            "w13": "gate_up_proj",
            "w2": "down_proj",
            "w13_bias": "gate_up_proj_bias",
            "w2_bias": "down_proj_bias",
        }
        for name, value in layer.items():
            setattr(module, fields[name], torch.nn.Parameter(value.bfloat16(), requires_grad=False))
        return module

    def module(self) -> torch.nn.Module:
        shape = self.source.shape
        sizes = {"hidden_size": shape.H, "_experts_implementation": self.implementation}
        if not shape.bias:
            from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

            return Qwen3MoeExperts(
                SimpleNamespace(
                    **sizes, num_experts=shape.E, moe_intermediate_size=shape.I,
                    hidden_act=ACTIVATIONS[shape.activation],
                )
            )  # fmt: skip
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        spec = resolve(shape.activation)
        return GptOssExperts(
            SimpleNamespace(
                **sizes, num_local_experts=shape.E, intermediate_size=shape.I, swiglu_alpha=spec.alpha,
                swiglu_limit=spec.limit,
            )
        )  # fmt: skip

    def inputs(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
        return hidden, ids.long(), weights.bfloat16()

    def run(self, layer: torch.nn.Module, inputs: tuple[Any, ...]) -> Tensor:
        return layer(*inputs)


class Eager(Grouped):
    roundings = 9  # its sum over the slots is in bf16: k roundings, most of them of a part of the sum
    implementation = "eager"
