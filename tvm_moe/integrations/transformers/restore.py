"""`unprepare_`: the original weights of a model that `prepare_` packed, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import packing
from ...errors import MoEError
from ...layers import Experts
from ...runtime import Layer
from . import swapped
from .experts import ORIGINAL, PACKED, Original
from .unfused import Unfused


@torch.inference_mode(False)  # or what is made could never be trained or written to
def unprepare_(model: nn.Module) -> list[str]:
    """Put the original weights back, layer by layer, and free the packed ones; returns the names of the layers.

    Weights that were bf16 and were packed as bf16 come back exactly, with all else that `prepare_` changed.

    Raises:
        MoEError: some layer was packed as INT8 or from f32 or f16 weights, which packing rounded. Nothing has been
            changed then.
    """
    if not isinstance(model, nn.Module):
        raise MoEError(f"unprepare_ takes a transformers model, got {type(model).__name__}")
    found = {name: module for name, module in model.named_modules() if hasattr(module, PACKED)}
    for name, module in found.items():
        if reason := lost(module):
            raise MoEError(f"{name} cannot be unpacked: {reason}; load the model again")
    for module in found.values():
        restore(module)
    swapped.swap_back(model)
    return list(found)


def lost(module: nn.Module) -> str:
    """Why the weights are not what they were."""
    original: Original = getattr(module, ORIGINAL)
    if original.parameters is None:
        return "its weights were loaded packed, it never had others"
    if (dtype := layers(module)[0].kernel.dtype) != "bf16":
        return f"it is packed as {dtype}, which has rounded its weights"
    kinds = {dtype for name, (_, dtype, _) in original.parameters.items() if not name.endswith("_bias")}
    if kinds != {torch.bfloat16}:
        return f"its weights were {', '.join(map(str, kinds))}, which packing has rounded to bf16"
    biases = {dtype for name, (_, dtype, _) in original.parameters.items() if name.endswith("_bias")}
    if torch.float64 in biases:
        return "its biases were float64, which packing has rounded to float32"
    return ""


def layers(module: nn.Module) -> list[Layer]:
    packed: Experts | Unfused = getattr(module, PACKED)
    parts = (packed.gate_up, packed.down) if isinstance(packed, Unfused) else (packed,)
    return [part.packed.layer for part in parts]


def restore(module: Any) -> None:
    """The module as it was; only its own packed weights are held beside the new ones."""
    original: Original = getattr(module, ORIGINAL)
    made = {
        name: nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu"), requires_grad=requires_grad)
        for name, (shape, dtype, requires_grad) in (original.parameters or {}).items()
    }
    with torch.no_grad():
        fill(made, layers(module), original)
    delattr(module, PACKED)
    delattr(module, ORIGINAL)
    for name, parameter in made.items():
        setattr(module, name, parameter)
    if original.config is not None:
        module.config = original.config


def fill(made: dict[str, nn.Parameter], packed: list[Layer], original: Original) -> None:
    first = next(iter(made))  # gate_up_proj or up_proj
    for e in range(packed[0].sizes.experts):
        for name, (w, bias) in zip((first, "down_proj"), matrices(packed, e), strict=True):
            if name == first and original.interleaved:
                w, bias = alternating(w), None if bias is None else alternating(bias)
            made[name][e].copy_(w.T if original.transposed else w)
            if bias is not None:
                made[f"{name}_bias"][e].copy_(bias)


def matrices(packed: list[Layer], e: int) -> list[tuple[Tensor, Tensor | None]]:
    """Gate/up and down of an expert, each with its bias, of one fused layer or of two linear ones."""
    weights = [packing.unpack(layer, e) for layer in packed]
    if len(weights) == 2:
        return [(w.w2, w.w2_bias) for w in weights]
    return [(weights[0].w13, weights[0].w13_bias), (weights[0].w2, weights[0].w2_bias)]


def alternating(halves: Tensor) -> Tensor:
    """[2I, ...] with gate and up rows in turn, of the gate half and the up half."""
    return torch.stack(halves.chunk(2), 1).flatten(0, 1)
