"""One expert as it is stored, and what it must be to be packed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from .errors import MoEError
from .kernels import DTYPES
from .plan import LayerSizes

Tensor = torch.Tensor
VECTORS = ("w13_scale", "w2_scale", "w13_bias", "w2_bias")
INT8_MAX_K = 2**31 // (127 * 128)  # 133,000: beyond it an int32 sum of products could overflow


@dataclass(frozen=True)
class ExpertWeights:
    """One expert as stored: w13 [2I, H] ([I, H] without gate), w2 [H, I], any strides; scales and biases [N] or None.

    In a layer without gate/up projections w13 is empty.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    @classmethod
    def linear(cls, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> ExpertWeights:
        """A matrix [N, K] alone, as `pack_linear` takes it."""
        return cls(w[:0], w, w2_scale=scale, w2_bias=bias)


def dtype_name(dtype: object) -> object:
    """ "bf16" or "int8" also where torch's names or dtypes stand for them; anything else as it is, to be refused."""
    name = str(dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "int8": "int8"}.get(name, dtype)


def check_sizes(dtype: str, E: int, H: int, I: int) -> None:
    if dtype not in DTYPES:
        raise MoEError(f"dtype={dtype!r} is not supported; expected one of {sorted(DTYPES)} or None")
    for name, value in (("num_experts", E), ("hidden_size", H), ("intermediate_size", I)):
        if value < 1:
            raise MoEError(f"{name} must be at least 1, got {value}")
    if dtype == "int8" and max(H, I) > INT8_MAX_K:
        raise MoEError(f"INT8 sums over K = {max(H, I)} can overflow int32; K may be at most {INT8_MAX_K}: use bf16")


def check_expert(e: int, w: ExpertWeights, sizes: LayerSizes, dtype: str) -> None:
    """Shapes, dtypes and device of one expert."""
    I, H = sizes.intermediate, sizes.hidden
    N = 2 * I if sizes.gated else I
    for name, tensor, rows, cols in (("w13", w.w13, N, H), ("w2", w.w2, H, I))[sizes.linear :]:
        check_weight(f"expert {e}, {name}", tensor, (rows, cols), dtype)
        for kind in ("scale", "bias"):
            vector = getattr(w, f"{name}_{kind}")
            exists = vector is not None
            wanted = tensor.dtype == torch.int8 if kind == "scale" else getattr(sizes, f"bias{name[1:]}")
            if exists != wanted:
                state = "missing" if wanted else "unexpected"
                raise MoEError(
                    f"expert {e}: {name}_{kind} is {state}; int8 weights need scales, float weights take none"
                )
            if exists and (vector.numel() != rows or not vector.is_floating_point()):
                raise MoEError(
                    f"expert {e}: {name}_{kind} has shape {tuple(vector.shape)} and dtype {vector.dtype}, "
                    f"expected [{rows}] or [{rows}, 1] floating"
                )


def check_alike(e: int, w: ExpertWeights, first: Collection[str]) -> None:
    """Scales and biases are those that the first expert has: a layer's experts are stored alike."""
    for name in VECTORS:
        if (getattr(w, name) is not None) != (name in first):
            state = "not given, but expert 0 has it" if name in first else "given, but expert 0 has none"
            raise MoEError(
                f"expert {e}: {name} is {state}; all experts of a layer need the same kind of weights: quantize all or none"
            )


def check_weight(label: str, tensor: Tensor, shape: tuple[int, int], dtype: str) -> None:
    if tensor.device.type != "cpu":
        raise MoEError(f"{label} is on {tensor.device}; this package runs on the CPU: call .cpu() first")
    if tuple(tensor.shape) != shape:
        raise MoEError(f"{label} has shape {tuple(tensor.shape)}, expected {shape}")
    floating = tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not (floating or (tensor.dtype == torch.int8 and dtype == "int8")):
        raise MoEError(f"{label} is {tensor.dtype}; dtype={dtype!r} takes bfloat16, float16, float32"
                       f"{' or int8' if dtype == 'int8' else ''}")  # fmt: skip
