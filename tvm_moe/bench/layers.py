"""Random layers in their own dtype. Each expert is made from a seed of its own: processes agree without sending weights,
and a check needs only the experts that its tokens touch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..experts import ExpertWeights
from ..models import LayerShape

DEVIATION = 127 / math.sqrt(3)  # of uniform int8
TORCH = {"int8": torch.int8, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Source:
    """The weights of one layer of ``shape``, "int8" with scales or "bf16"; products stay of order 1."""

    shape: LayerShape
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of the matrices alone."""
        return self.shape.E * self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        return self.shape.expert_weights() * TORCH[self.dtype].itemsize

    @property
    def options(self) -> dict[str, Any]:
        """What `pack_experts` and the reference must be told."""
        return {"activation": self.shape.activation}

    def expert(self, e: int) -> ExpertWeights:
        H, I = self.shape.H, self.shape.I
        rng = np.random.Generator(np.random.SFC64(e))
        w13, s13 = self.matrix(rng, 2 * I, H)
        w2, s2 = self.matrix(rng, H, I)
        b13, b2 = (bias(rng, n) if self.shape.bias else None for n in (2 * I, H))
        return ExpertWeights(w13, w2, s13, s2, b13, b2)

    def matrix(self, rng: np.random.Generator, N: int, K: int) -> tuple[Tensor, Tensor | None]:
        """[N, K] of deviation about K^-0.5. BF16 takes the same integers times a power of two: exact."""
        q = random_int8(rng, N * K).reshape(N, K)
        if self.dtype == "bf16":
            return q.bfloat16().mul_(2.0 ** -round(math.log2(DEVIATION * K**0.5))), None
        scale = torch.from_numpy(rng.uniform(0.5, 1.5, N).astype(np.float32))
        return q, scale / (DEVIATION * K**0.5)

    def experts(self) -> Iterator[ExpertWeights]:
        return map(self.expert, range(self.shape.E))

    def stacked(self, interleaved: bool = False) -> dict[str, Tensor]:
        """All experts in one tensor a field, [E, ...], filled one by one; `interleaved`: gate and up rows alternate."""
        made: dict[str, Tensor] = {}
        for e, expert in enumerate(self.experts()):
            for name, value in vars(expert).items():
                if value is None:
                    continue
                if e == 0:
                    made[name] = torch.empty(self.shape.E, *value.shape, dtype=value.dtype)
                made[name][e] = alternate(value) if interleaved and "13" in name else value
        return made


def random_int8(rng: np.random.Generator, n: int) -> Tensor:
    """Uniform in [-127, 127] (127 for two of 256 bit patterns)."""
    words = rng.integers(0, 2**64 - 1, -(-n // 8), dtype=np.uint64, endpoint=True)
    return torch.from_numpy(words.view(np.int8)[:n]).clamp_(min=-127)


def bias(rng: np.random.Generator, n: int) -> Tensor:
    """f32 [N], exact in bf16, which some peers want."""
    return torch.from_numpy(rng.normal(0, 0.1, n).astype(np.float32)).bfloat16().float()


def alternate(half_split: Tensor) -> Tensor:
    """Rows g0, g1, ..., u0, u1, ... to g0, u0, g1, u1, ..."""
    return torch.stack(half_split.chunk(2), 1).flatten(0, 1)


def layers_in_rotation(layer_bytes: int, l3_bytes: int, least: int = 256 << 20, most: int = 64) -> int:
    """How many layers take turns, so that no call finds its weights cached: at least two, and 3 times the L3."""
    return min(most, max(2, -(-max(least, 3 * l3_bytes) // layer_bytes)))
