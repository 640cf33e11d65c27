"""The vector math of the epilogues, compiled as the modules are, over every exponent of f32, against float64."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
import tvm
from tvm import te

from tests.conftest import rows
from tests.helpers import U, assert_within
from tvm_moe import isa, reference
from tvm_moe.activations import ACTIVATIONS, resolve
from tvm_moe.compiler import build, mathfn
from tvm_moe.compiler.pipeline import PIPELINE

TINY = 2.0**-126  # results may be denormal or flushed
OPTIONS = [
    ("silu", {}),
    ("silu", {"limit": 2.0}),
    ("gelu", {}),
    ("gelu_tanh", {}),
    ("swigluoai", {}),
    ("swigluoai", {"alpha": 0.5, "limit": 2.0}),
    ("swiglustep", {"limit": 2.0}),
    ("relu2", {}),
]


def sweep(per_exponent=512):
    """Every exponent (denormals included), both signs, mantissas from end to end."""
    mantissa = np.linspace(0, 2**23 - 1, per_exponent).astype(np.uint32)
    positive = ((np.arange(255, dtype=np.uint32) << 23)[:, None] | mantissa).ravel().view(np.float32)
    return torch.from_numpy(np.concatenate([positive, -positive])).clone()  # aligned, as TVM expects it


def compiled(kernel, function, inputs=1):
    """``function`` of f32 vectors, as code for the row's target: with and without FMA."""
    n = te.var("n", "int64")
    placeholders = [te.placeholder((n,), "float32", name=f"x{i}") for i in range(inputs)]
    out = te.compute((n,), lambda i: function(*(x(i) for x in placeholders)), name="out")
    target = build.target(kernel, isa.machine())
    module = tvm.compile(te.create_prim_func([*placeholders, out]), tir_pipeline=PIPELINE, target=target)

    def run(*values):
        result = torch.full_like(values[0], 7)
        module["main"](*(v.contiguous() for v in values), result)
        return result

    return run


def test_exp(bf16_kernel):
    x = sweep()
    got = compiled(bf16_kernel, mathfn.exp_minus)(x)
    inside = (x >= -88.37) & (x <= 87.3)
    want = (-x[inside].double()).exp()
    assert_within(got[inside], want, 2e-7 * want)
    assert got[x < -88.5].eq(math.inf).all()
    assert got[x > 87.3].le(2 * TINY).all()


def test_erfc(bf16_kernel):
    x = sweep()
    x = x[(x >= 0) & (x < 9)]
    got = compiled(bf16_kernel, lambda v: mathfn.let(v, mathfn.erfc_positive))(x)
    want = torch.special.erfc(x.double())
    assert_within(got, want, (5e-7 + x.double() ** 2 * 2 * U) * want)


def test_the_tails_of_gelu_keep_their_relative_accuracy(bf16_kernel):
    """1 + erf(x) would cancel: its error at g = -5 is 20 % of the result."""
    g = sweep()
    g = g[(g > -12) & (g.abs() > 1e-30)]
    got = compiled(bf16_kernel, mathfn.gelu)(g)
    want = g.double() / 2 * torch.special.erfc(-g.double() / math.sqrt(2))
    # That of erfc of g / sqrt(2), whose rounding moves the exponent by g^2 U, and 4 roundings.
    assert_within(got, want, (5e-7 + 2 * g.double() ** 2 * U + 4 * U) * want.abs())


def exact(spec, g, u):
    """The definition in f64: `reference.activate` computes in the precision of its input."""
    return reference.activate(torch.cat([g.double(), u.double()]), spec)[: len(g)]


@cache
def activation(kernel, spec):
    alpha, limit = mathfn.f32(spec.alpha), mathfn.f32(spec.limit) if math.isfinite(spec.limit) else None
    return compiled(kernel, lambda g, u: mathfn.activate(spec.name, g, u, alpha, limit), inputs=2)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_activations(bf16_kernel, name, options):
    spec = resolve(name, **options)
    function, g = activation(bf16_kernel, spec), sweep(64)
    for up in (0.0, 1.0, -0.3, 9.0, -1e4):
        u = torch.full_like(g, up)
        got, want = function(g, u), exact(spec, g, u)
        # 16 roundings, relative to g where 1 + erf and 1 + tanh cancel.
        magnitude = want.abs() if name == "relu2" else g.double().clamp(max=spec.limit).abs() * (abs(up) + 1)
        fits = want.abs() < torch.finfo(torch.float32).max * (1 - 2 * U)
        assert fits.float().mean() > 0.6
        assert_within(got[fits], want[fits], (16 * U * magnitude + TINY * (1 + abs(up)))[fits])


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_large_negative_gates_give_zero(bf16_kernel, name, options):
    g = -torch.tensor([250.0, 1e3, 1e10, 1e13, 1e20, 1e30, 3.4e38])
    got = activation(bf16_kernel, resolve(name, **options))(g, torch.ones_like(g))
    assert got.abs().max() <= 1e-34


@pytest.mark.parametrize(("name", "options"), OPTIONS)
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF])
def test_nan_comes_through(bf16_kernel, name, options, bits):
    nan = torch.full((40,), bits, dtype=torch.int64).to(torch.uint32).view(torch.float32)
    assert nan.isnan().all()
    one, function = torch.ones(40), activation(bf16_kernel, resolve(name, **options))
    assert function(nan, one).isnan().all()
    if ACTIVATIONS[name].gated:
        assert function(one, nan).isnan().all()


def test_rounding_is_half_to_even(bf16_kernel):
    x = torch.cat([torch.arange(-4e4, 4e4, 0.5), torch.tensor([-0.0, 2.0**21 + 0.5, -(2.0**21) - 1.5])])
    got = compiled(bf16_kernel, lambda v: mathfn.round_bits(v).astype("float32"))(x)
    assert torch.equal(got, torch.round(x))


def test_clamps_keep_nan_and_order(bf16_kernel):
    x = torch.tensor([math.nan, -math.inf, -2, -1, 0, 1, 2, math.inf])
    low = compiled(bf16_kernel, lambda v: mathfn.at_least(v, mathfn.f32(-1.0)))(x)
    high = compiled(bf16_kernel, lambda v: mathfn.at_most(v, mathfn.f32(1.0)))(x)
    assert torch.equal(low[1:], x[1:].clamp(min=-1))
    assert torch.equal(high[1:], x[1:].clamp(max=1))
    assert low[0].isnan()
    assert high[0].isnan()


def test_conversion_to_bf16_is_that_of_torch(bf16_kernel):
    """Every exponent, halfway cases to even, overflow to Inf, denormals, and NaN that stays NaN."""
    from tvm_moe.compiler.compute import bf16_to_f32, f32_to_bf16

    halfway = (torch.arange(0x0000, 0xFF80, 7, dtype=torch.int64) << 16 | 0x8000).to(torch.uint32).view(torch.float32)
    x = torch.cat([sweep(), halfway, torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 3.4e38])])
    there_and_back = compiled(bf16_kernel, lambda v: bf16_to_f32(f32_to_bf16(v)))(x)
    want = x.bfloat16().float()
    assert torch.equal(there_and_back.isnan(), want.isnan())
    assert torch.equal(there_and_back[~want.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("row", [row for row in rows("int8") if row.values[0].fused])
@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_division_by_a_known_divisor(row, kind):
    """Bit for bit that of IEEE, wherever the packing uses it: quotients up to 127, divisors from 2^-100 to 2^100."""
    n, random = 2**22, torch.Generator().manual_seed(7)
    x = torch.randn(n, generator=random)
    x = x.bfloat16().float() if kind == "bf16" else x
    top = x.abs() * (1 + 8 * torch.rand(n, generator=random))
    by = (top / 127) * torch.exp2(torch.randint(-90, 90, (n,), generator=random))
    x = x * torch.exp2(torch.log2(by * 127 / top).round())
    by = torch.where((by >= 2.0**-100) & (by <= 2.0**100), by, torch.ones(()))
    got = compiled(row, mathfn.divided, inputs=3)(x, by, 1 / by)
    assert torch.equal(got, x / by)
