"""Rows that travel as bytes, and results of slots that are summed."""

from __future__ import annotations

import torch
from torch import Tensor

COMBINED_TOKENS = 64  # at a time: their terms stay in cache, and need no fresh memory


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


def combined(results: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """f32 [T, H]: ``sum_j weights[t, j] * results[i]``, slots[i] = t * k + j, in slot order as the kernels sum. Each product
    is rounded; theirs are not, so that the last bits may differ.

    results: f32 [S, H]; slots: int64 [S], without those that were skipped; weights: f32 [T, k].
    """
    T, k = weights.shape
    total = results.new_zeros(T, results.shape[1])
    if not len(results):
        return total
    position = slots.new_full((T * k,), -1)
    position[slots] = torch.arange(len(slots), device=slots.device)
    position, skips = position.view(T, k), len(slots) < T * k
    for begin in range(0, T, COMBINED_TOKENS):
        part = slice(begin, begin + COMBINED_TOKENS)
        for j in range(k):
            at = position[part, j]
            term = results[at.clamp(min=0)].mul_(weights[part, j, None])
            total[part] += term.masked_fill_(at[:, None] < 0, 0) if skips else term
    return total
