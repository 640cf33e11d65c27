"""Which of our activations an experts module has: found by running its own on a grid of values, never by its name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import reference
from ...activations import resolve

ROWS = 16  # at least so many pairs for every channel
# Fine steps where activations bend and limits lie, then far beyond any limit.
FAR = (20.0, 60.0, 300.0, 1e4, 1e6)
# 16 roundings in f32 on both sides: see tests/helpers.py. The approximation gelu_tanh differs from gelu 100 times as much.
TOLERANCE = 2.0**-19


def recognise(
    apply: Callable[[Tensor], Tensor], module: nn.Module, intermediate: int, gated: bool
) -> dict[str, Any] | str:
    """Keyword arguments of `pack_experts` for the activation that ``apply`` computes, or the reason why there are none.

    ``apply`` takes gate and up [R, 2I] to [R, I] (without gate: [R, I] to [R, I]); numbers in ``module`` that are called
    an alpha or a limit are candidates for those.
    """
    g, u = grid(intermediate)
    layouts = {False: torch.cat([g, u], -1), True: torch.stack([g, u], -1).flatten(-2)} if gated else {False: g}
    scale = (1 + g.abs()) * (1 + (u if gated else g).abs())
    for interleaved, x in layouts.items():
        try:
            with torch.no_grad():
                got = apply(x.clone())
        except Exception as error:  # whatever a foreign function raises
            return f"its activation cannot be tried out in float32 ({error})"
        for options in candidates(module, gated):
            spec = resolve(options["activation"], options.get("alpha"), options.get("limit"))
            want = reference.activate(x, spec, interleaved)
            if got.shape == want.shape and bool(((got - want).abs() <= TOLERANCE * scale).all()):
                return {**options, "interleaved": interleaved}
    return "its activation is none of ours"


def grid(intermediate: int) -> tuple[Tensor, Tensor]:
    """f32 gate and up [R, I] that hold every pair of values, each channel at least `ROWS` pairs."""
    values = torch.linspace(-12, 12, 49, device="cpu", dtype=torch.float32)
    far = torch.tensor(FAR, device="cpu", dtype=torch.float32)
    pairs = torch.cartesian_prod(*[torch.cat([values, far, -far])] * 2)
    rows = max(ROWS, -(-len(pairs) // intermediate))
    index = torch.arange(rows * intermediate, device="cpu") % len(pairs)
    g, u = pairs[index].view(rows, intermediate, 2).unbind(-1)
    return g, u


def candidates(module: nn.Module, gated: bool) -> Iterator[dict[str, Any]]:
    if not gated:
        yield {"activation": "relu2"}
        return
    for name in ("silu", "gelu", "gelu_tanh"):
        yield {"activation": name}
    alphas, limits = numbers(module, "alpha"), [limit for limit in numbers(module, "limit") if limit > 0]
    for name, limit in itertools.product(("silu", "swiglustep"), limits):
        yield {"activation": name, "limit": limit}
    for alpha, limit in itertools.product(alphas, limits):
        yield {"activation": "swigluoai", "alpha": alpha, "limit": limit}


def numbers(module: nn.Module, word: str) -> list[float]:
    """Finite numbers among the module's attributes whose name has ``word`` in it."""
    found = {v for name, v in vars(module).items() if word in name and isinstance(v, int | float)}
    return sorted(float(v) for v in found if math.isfinite(v))
