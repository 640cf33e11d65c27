"""`reference.activate` against torch.nn.functional, and where naive formulas break."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import U, assert_within
from tvm_moe import reference
from tvm_moe.activations import ACTIVATIONS, resolve

GATED = ["silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep"]


def spec_of(name, **options):
    return resolve(name, **({"limit": 7.0} | options if name == "swiglustep" else options))


def activate(name, g, u, **options):
    return reference.activate(torch.cat([g, u], -1), spec_of(name, **options))


@pytest.mark.parametrize(
    ("name", "options", "formula"),
    [
        ("silu", {}, lambda g, u: F.silu(g) * u),
        ("silu", {"limit": 2.0}, lambda g, u: F.silu(g.clamp(max=2)) * u.clamp(-2, 2)),
        ("gelu", {}, lambda g, u: F.gelu(g) * u),
        ("gelu_tanh", {}, lambda g, u: F.gelu(g, approximate="tanh") * u),
        ("swigluoai", {}, lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7))),
        (
            "swigluoai",
            {"alpha": 0.5, "limit": 2.0},
            lambda g, u: (u.clamp(-2, 2) + 1) * g.clamp(max=2) * torch.sigmoid(0.5 * g.clamp(max=2)),
        ),
        ("swiglustep", {"limit": 2.0}, lambda g, u: F.silu(g).clamp(max=2) * u.clamp(-2, 2)),
        ("relu2", {}, lambda g, u: F.relu(torch.cat([g, u], -1)) ** 2),
    ],
)
def test_activations_equal_their_formulas(name, options, formula):
    g, u = torch.meshgrid(torch.linspace(-30, 30, 241), torch.linspace(-9, 9, 37), indexing="xy")
    got, want = activate(name, g, u, **options), formula(g.double(), u.double())
    # At most 16 roundings; 1 + erf and 1 + tanh cancel for g < 0, where the error is relative to g instead.
    magnitude = want.abs() if name == "relu2" else g.double().abs() * (u.double().abs() + 1)
    assert_within(got, want, 16 * U * magnitude + 1e-45)


@pytest.mark.parametrize("name", GATED)
def test_large_gates_do_not_overflow(name):
    g = torch.tensor([88.0, 89, 1e3, 1e4, 1e13, 1e20, 3e38]).repeat(
        40
    )  # both sides of exp's overflow, vectors and tails
    u = torch.full_like(g, 0.5)
    spec = spec_of(name)
    up = min(0.5, spec.limit) + (name == "swigluoai")
    assert_within(activate(name, g, u), g.clamp(max=spec.limit).double() * up, 16 * U * g.double())
    assert activate(name, -g, u).abs().max() <= 1e-30
    assert activate(name, -g, 1e38 * u).isfinite().all()


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_comes_through_every_clamp(name, sign):
    nan = torch.full((40,), math.copysign(math.nan, sign))
    one = torch.ones(40)
    g_first, u_first = activate(name, nan, one), activate(name, one, nan)
    assert (g_first[:40] if name == "relu2" else g_first).isnan().all()
    assert (u_first[40:] if name == "relu2" else u_first).isnan().all()


def test_interleaved_rows_are_gate_and_up_by_turns():
    g, u = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    mixed = torch.stack([g, u], -1).flatten(-2)
    assert torch.equal(reference.activate(mixed, resolve("silu"), interleaved=True), activate("silu", g, u))
