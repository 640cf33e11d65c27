"""torchao's `Int8Tensor` experts: int8 weights ``qdata`` [E, N, K] with ``scale`` [E, N, 1], known by these parts alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_quantized(w: Any) -> bool:
    return hasattr(w, "qdata") and hasattr(w, "scale")


def parts(w: Any, name: str) -> tuple[Tensor, Tensor] | str:
    """Weights and scales of such a tensor, or why they cannot be used."""
    q, scale = w.qdata, w.scale
    if q.dtype != torch.int8 or q.ndim != 3 or tuple(scale.shape) != (*q.shape[:2], 1):
        return f"{name} is {q.dtype} {tuple(q.shape)} with scales {tuple(scale.shape)}, expected int8 [E, N, K] and [E, N, 1]"
    if (zero := getattr(w, "zero_point", None)) is not None and zero.any():
        return f"{name} is quantized with zero points: only symmetric int8 is supported"
    if any(getattr(w, kind, None) is not None for kind in ("act_pre_scale", "act_quant_scale")):
        return f"{name} comes with scales for its input: only dynamic ones, per token, are supported"
    return q, scale
