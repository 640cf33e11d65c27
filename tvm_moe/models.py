"""Sizes of MoE layers people run (plain data, read by the benchmark, the tuner and the docs)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import MoEError


@dataclass(frozen=True)
class LayerShape:
    """One expert layer: hidden size H, intermediate size I, experts E, experts per token k."""

    name: str
    H: int
    I: int
    E: int
    k: int
    activation: str = "silu"
    bias: bool = False

    def operations(self, tokens: int) -> int:
        """Multiply-adds of one call, counted as two operations each: gate, up and down projection."""
        return 2 * tokens * self.k * 3 * self.H * self.I

    def expert_weights(self) -> int:
        """Weights of one expert (elements)."""
        return 3 * self.H * self.I


MODELS = {
    m.name: m
    for m in (
        LayerShape("qwen3-30b-a3b", 2048, 768, 128, 8),
        LayerShape("gpt-oss-20b", 2880, 2880, 32, 4, "swigluoai", bias=True),
        LayerShape("gpt-oss-120b", 2880, 2880, 128, 4, "swigluoai", bias=True),
        LayerShape("mixtral-8x7b", 4096, 14336, 8, 2),
        LayerShape("gemma-4-26b-a4b", 2816, 704, 128, 8, "gelu_tanh"),
        LayerShape("deepseek-v2-lite", 2048, 1408, 64, 6),
        LayerShape("olmoe-1b-7b", 2048, 1024, 64, 8),
        LayerShape("deepseek-v2", 5120, 1536, 160, 6),
        LayerShape("deepseek-v3", 7168, 2048, 256, 8),
        LayerShape("granite-4-h-small", 4096, 768, 72, 10),
    )
}


def find(name: str) -> LayerShape:
    """The model called ``name``, or an error that lists the known ones."""
    if name not in MODELS:
        raise MoEError(f"unknown model {name!r}; expected one of {', '.join(MODELS)}")
    return MODELS[name]
