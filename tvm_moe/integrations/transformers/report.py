"""What `prepare_` did, layer by layer, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ... import activations
from ...experts import PackedExperts
from .. import torchao


@dataclass(frozen=True)
class PackedLayer:
    """``before`` and ``after``: bytes of the experts' weights. ``not_fused``: why its activation runs on its own, or ""."""

    name: str
    dtype: str
    activation: str
    isa: str
    before: int
    after: int
    not_fused: str = ""

    def __str__(self) -> str:
        note = f", not fused: {self.not_fused}" if self.not_fused else ""
        return (
            f"{self.name}: {self.dtype}, {self.activation}, {self.isa}, {mib(self.before)} -> {mib(self.after)}{note}"
        )


@dataclass
class Report:
    """``left`` and ``already`` have the names of experts modules that were not touched: (name, reason), and packed before.

    ``before`` and ``after`` are the bytes of all parameters and buffers of the model.
    """

    packed: list[PackedLayer] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    before: int = 0
    after: int = 0

    def __str__(self) -> str:
        layers = "1 MoE layer" if len(self.packed) == 1 else f"{len(self.packed)} MoE layers"
        lines = [f"tvm_moe packed {layers}; the model takes {mib(self.before)} -> {mib(self.after)}"]
        lines += [f"  {layer}" for layer in self.packed]
        lines += [f"  {name}: packed before, nothing changed" for name in self.already]
        lines += [f"  {name}: left to transformers: {reason}" for name, reason in self.left]
        if not (self.packed or self.already or self.left):
            lines.append("  no experts were found in this model")
        return "\n".join(lines)


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def memory(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once; torchao's by their parts."""
    found = {id(t): t for tensors in (model.parameters(), model.buffers()) for t in tensors}
    return sum(size(t) for t in found.values())


def size(tensor: Any) -> int:
    parts = (tensor.qdata, tensor.scale) if torchao.is_quantized(tensor) else (tensor,)
    return sum(part.numel() * part.element_size() for part in parts if not getattr(part, "is_meta", False))


def activation(packed: PackedExperts) -> str:
    """The activation with its parameters, those that it takes."""
    spec = packed.layer.activation
    parts = {"alpha": spec.alpha} if spec.kind.takes_alpha else {}
    parts |= {"limit": spec.limit} if spec.kind.takes_limit and spec.limit != activations.NONE.limit else {}
    return spec.name + (f"({', '.join(f'{name}={value:g}' for name, value in parts.items())})" if parts else "")


__all__ = ["PackedLayer", "Report", "activation", "memory", "size"]
