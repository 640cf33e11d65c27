"""Rows of several tensors that travel as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def joined(*tensors: Tensor) -> Tensor:
    """Rows of bytes, [n, ...], of several tensors [n, columns]: one message, of no dtype that a backend may lack."""
    pieces = [t.flatten().view(torch.uint8).view(len(t), t.shape[1] * t.itemsize) for t in tensors]
    return torch.cat(pieces, 1)


def parted(rows: Tensor, *columns: tuple[int, torch.dtype]) -> list[Tensor]:
    """The tensors that `joined` took, by their columns and dtypes."""
    pieces = rows.split([n * dtype.itemsize for n, dtype in columns], 1)
    # A copy begins where any dtype may; of a single row, contiguous() would make none.
    return [
        piece.clone(memory_format=torch.contiguous_format).view(dtype)
        if n
        else rows.new_empty(len(rows), 0, dtype=dtype)
        for piece, (n, dtype) in zip(pieces, columns, strict=True)
    ]
