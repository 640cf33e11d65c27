"""What must not leak: broken tokens into others, old scratch memory into results, a call into the caller's state."""

from __future__ import annotations

import math
import os

import pytest
import torch

import tvm_moe
from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tvm_moe import runtime

F32 = torch.float32


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, F32])
def test_a_broken_token_breaks_no_other(kernel, bad, x_dtype):
    case = make_case(T=9, E=2, H=70, I=35, x_dtype=x_dtype, dtype=kernel.dtype)
    packed = case.pack(kernel)
    want = case.run(packed)
    case.x[3, 66], case.x[7, 0] = bad, bad
    got = case.run(packed)
    others = [0, 1, 2, 4, 5, 6, 8]
    assert torch.equal(got[others], want[others])
    broken = got[[3, 7]]
    assert broken.isnan().all() if kernel.dtype == "int8" or math.isnan(bad) else not broken.isfinite().any()


@pytest.mark.parametrize("options", ACTIVATION_OPTIONS, ids=str)
@pytest.mark.parametrize("part", ["gate", "up"])
def test_nan_comes_through_every_activation(kernel, options, part):
    """A NaN in one bias makes one value of the intermediate NaN, which all of the token's results contain."""
    case = make_case(T=3, E=2, k=1, H=40, I=20, bias=True, x_dtype=F32, dtype=kernel.dtype, **options)
    case.ids[:] = torch.tensor([[0], [1], [0]])
    row = {"gate": 0, "up": 1 if options.get("interleaved") else 20}[part]
    case.options["w13_bias"][1, 3 if options["activation"] == "relu2" else row] = math.nan
    got = case.run(case.pack(kernel))
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("options", ACTIVATION_OPTIONS, ids=str)
def test_large_gates_do_not_overflow(kernel, options):
    """What a checkpoint's outlier channels do: gates of +-1e4 and more, where exp(-g) overflows."""
    case = make_case(T=6, E=2, k=2, H=40, I=20, bias=True, x_dtype=F32, dtype=kernel.dtype, **options)
    case.options["w13_bias"][:, ::3] *= 1e5
    got = case.run(case.pack(kernel))
    assert got.isfinite().all()
    assert_matches_reference(got, case)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_of_experts_nobody_asked_for_do_not_leak(bf16_kernel, bad):
    case = make_case(T=6, E=4, H=40, I=20, x_dtype=F32)
    case.ids[case.ids == 2] = -1
    want = case.run(case.pack(bf16_kernel))
    case.w13[2], case.w2[2] = bad, bad
    assert torch.equal(case.run(case.pack(bf16_kernel)), want)


@pytest.mark.parametrize("poison", [0xFF, 0x7F, 0x80])
@pytest.mark.parametrize("T", [1, 7, 64])
def test_scratch_memory_may_hold_anything(kernel, T, poison):
    """0xFF: NaN and -1, 0x7F: NaN in f32 and 127, 0x80: tiny and -128."""
    case = make_case(T=T, E=5, H=67, I=35, k=3, bias=True, x_dtype=F32, dtype=kernel.dtype)
    case.ids[0, 1] = -1
    packed = case.pack(kernel)
    want = case.run(packed)
    assert_matches_reference(want, case)
    runtime._scratch.held[0].fill(poison)
    assert torch.equal(case.run(packed), want)


def test_a_large_call_leaves_nothing_to_a_small_one(kernel):
    large = make_case(T=90, E=6, H=130, I=70, x_dtype=F32, dtype=kernel.dtype, seed=1)
    small = make_case(T=3, E=2, H=20, I=9, bias=True, x_dtype=F32, dtype=kernel.dtype)
    packed = small.pack(kernel)
    want = small.run(packed)
    large.but(x=large.x * math.nan).run(large.pack(kernel))
    assert torch.equal(small.run(packed), want)


def test_the_callers_tensors_and_state_stay_as_they_are(kernel):
    case = make_case(T=9, H=66, I=35, bias=True, weights="int8" if kernel.dtype == "int8" else "f32")
    tensors = [case.x, case.w13, case.w2, case.weights, case.ids, *case.options.values()]
    before = [t.clone() for t in tensors]

    def state():
        return (
            torch.get_rng_state().tolist(), torch.get_num_threads(), os.sched_getaffinity(0), dict(os.environ),
            torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_interop_threads(),
        )  # fmt: skip

    state_before = state()
    case.run(case.pack(kernel))
    assert state() == state_before
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_changing_the_source_afterwards_changes_nothing(kernel):
    case = make_case(T=9, bias=True, weights="int8" if kernel.dtype == "int8" else "bf16")
    packed = case.pack(kernel)
    want = case.run(packed)
    for tensor in (case.w13, case.w2, *case.options.values()):
        tensor.zero_()
    assert torch.equal(case.run(packed), want)


def test_no_gradient_is_recorded(kernel):
    case = make_case(T=5, x_dtype=F32, bias=True, dtype=kernel.dtype)
    want = case.run(case.pack(kernel))
    biases = {name: v.requires_grad_() for name, v in case.options.items() if name.endswith("bias")}
    learned = case.but(
        x=case.x.requires_grad_(), weights=case.weights.requires_grad_(), options=case.options | biases,
        w13=torch.nn.Parameter(case.w13), w2=torch.nn.Parameter(case.w2),
    )  # fmt: skip
    got = learned.run(learned.pack(kernel))
    assert not got.requires_grad
    assert torch.equal(got, want)
    (got * learned.weights.sum()).sum().backward()  # usable as a constant of the caller's graph


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_under_inference_mode(kernel, mode):
    case = make_case(T=5, dtype=kernel.dtype)
    want = case.run(case.pack(kernel))
    with mode():
        inner = case.but(x=case.x.clone())
        assert torch.equal(inner.run(inner.pack(kernel), torch.empty_like(inner.x)), want)
    assert torch.equal(inner.run(inner.pack(kernel)), want)  # inference tensors outside of the mode


def test_other_default_dtypes_and_devices(kernel):
    case = make_case(T=5, bias=True, dtype=kernel.dtype)
    want = case.run(case.pack(kernel))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = tvm_moe.fused_moe(case.x, case.pack(kernel), case.weights, case.ids)
    finally:
        torch.set_default_dtype(F32)
    assert torch.equal(got, want)


def test_lazy_minus_signs_are_seen(kernel):
    case = make_case(T=5, x_dtype=F32, bias=True, dtype=kernel.dtype)
    plain = case.but(x=-case.x, weights=-case.weights, w13=-case.w13)
    lazy = case.but(x=torch._neg_view(case.x), weights=torch._neg_view(case.weights), w13=torch._neg_view(case.w13))
    assert torch.equal(lazy.run(lazy.pack(kernel)), plain.run(plain.pack(kernel)))
