"""How far rounding may take a model's outputs, found by moving every operation's result: derived from the model alone.

Every implementation of a bf16 model rounds its intermediate results to bf16, at about the places where transformers' eager
code does (a fused kernel at fewer). Taken as independent and uniform within half a unit in the last place, these errors add
up to one that exceeds 8 standard deviations with probability 2 e^-32 (a uniform variable is sub-Gaussian with its own
variance). The standard deviation is measured on the same model in f64, every result of an operation moved by such errors.
What a model computes in f32 whatever its dtype stays f32 there, and is not moved.

Choosing experts is not continuous: the choices of one run are repeated in the others.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

RUNS, DEVIATIONS = 12, 8
BITS = 8  # significant bits of bf16


class Choices(TorchDispatchMode):
    """Records what torch.topk chooses, or repeats what another run recorded."""

    def __init__(self, repeated: list[Tensor] | None = None) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.margins: list[Tensor] = []  # [tokens] each: how much less any other value is than those chosen
        self.repeated = repeated

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func is not torch.ops.aten.topk.default:
            return out
        values = args[0]
        assert len(args) < 3 or args[2] in (-1, values.ndim - 1), "the last dimension is that of the experts"
        chosen = out[1] if self.repeated is None else self.repeated[len(self.made)]
        taken = values.gather(-1, chosen)
        margins = taken.amin(-1) - values.scatter(-1, chosen, -torch.inf).amax(-1)
        self.made.append(chosen)
        self.margins.append(margins.view(len(values), -1).amin(-1))
        return taken, chosen


class Rounded(TorchDispatchMode):
    """Moves every new f64 value by up to half a unit in the last place of bf16."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        return out if func.is_view else tree_map(self.move, out)

    def move(self, t):
        if not isinstance(t, Tensor) or t.dtype != torch.float64:
            return t
        _, exponent = torch.frexp(t)
        error = torch.rand(t.shape, generator=self.rng, dtype=torch.float32) * 2 - 1
        return t.add_(torch.where(t.isfinite() & (t != 0), torch.ldexp(error.double(), exponent - BITS - 1), 0))


@torch.no_grad()
def logits(
    model: nn.Module, ids: Tensor, repeated: list[Tensor] | None = None, seed: int | None = None
) -> tuple[Tensor, Choices]:
    """f64 [B, T, V] of token ids [B, T], and the choices of experts that were made; a seed asks for rounding errors."""
    with ExitStack() as stack:
        if seed is not None:
            stack.enter_context(Rounded(seed))
        choices = stack.enter_context(Choices(repeated))
        return model(ids, use_cache=False).logits.double(), choices


class Spread:
    """Of a bf16 model's logits [B, T, V]: as they are, exact, and ``bound``, how far rounding may take any of them."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        self.rounded, choices = logits(model, ids)
        self.choices = choices.made
        exact = copy.deepcopy(model).double()
        runs = [logits(exact, ids, self.choices, seed) for seed in (None, *range(RUNS))]
        found = torch.stack([run for run, _ in runs])
        self.exact = found[0]
        self.bound = DEVIATIONS * deviation(found)
        # How much closer to each other two implementations, each with errors of its own, may bring what is compared.
        closer = DEVIATIONS * 2**0.5
        best = self.rounded.topk(2).indices
        gaps = (found.gather(-1, best.expand(len(found), *best.shape)) * torch.tensor([1.0, -1.0])).sum(-1)
        first, second = self.rounded.gather(-1, best).unbind(-1)
        self.undecided = first - second <= closer * deviation(gaps)
        margins = torch.stack([torch.stack(c.margins) for _, c in runs])  # [1 + runs, layers, B * T]
        close = torch.stack(choices.margins) <= closer * deviation(margins)
        # Of positions [B, T]: whether the greedy token, or an expert there or before, may be another.
        self.undecided |= close.any(0).view(ids.shape)
        self.undecided = self.undecided.cummax(-1).values


def deviation(found: Tensor) -> Tensor:
    """Standard deviation of runs [1 + runs, ..., N], the first of them exact; that of all N where it is more."""
    squares = (found[1:] - found[0]).nan_to_num(0, 0, 0).square().mean(0)
    return torch.maximum(squares, squares.mean(-1, keepdim=True)).sqrt()
