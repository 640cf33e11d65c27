"""The tensors of one layer: linear weights, quantized or not, and vectors over its experts."""

from __future__ import annotations

import torch

from .files import FLOATS, TensorFiles

Linear = tuple[torch.Tensor, torch.Tensor | None]


class LayerTensors:
    """Names are relative to ``prefix``."""

    def __init__(self, files: TensorFiles, prefix: str):
        self._files, self._prefix = files, prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._files

    def dtype(self, name: str) -> str:
        return self._files.dtype(self._prefix + name)

    def row(self, name: str, shape: tuple[int, ...], row: int) -> torch.Tensor:
        """``[row]`` of a float tensor of this ``shape``."""
        return self._files.read(self._prefix + name, shape, row=row)

    def linear(self, name: str, shape: tuple[int, int], dtypes: tuple[str, ...]) -> Linear:
        """Weight ``[N, K]`` and, where it is int8, its scale ``[N]`` in f32."""
        weight = self._files.read(f"{self._prefix}{name}.weight", shape, dtypes)
        if weight.dtype != torch.int8:
            return weight, None
        return weight, self._files.read(f"{self._prefix}{name}.weight_scale", (shape[0], 1)).float().flatten()

    def dense(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """Weight ``[N, K]`` in f32, dequantized where it is int8."""
        weight, scale = self.linear(name, shape, (*FLOATS, "I8"))
        return weight.float() if scale is None else weight.float() * scale[:, None]

    def vector(self, name: str | None, size: int) -> torch.Tensor | None:
        """``[size]`` in f32; None for no name."""
        return None if name is None else self._files.read(self._prefix + name, (size,)).float()
