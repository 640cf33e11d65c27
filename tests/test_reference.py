"""The reference layer against independent arithmetic, and what it does with slots, tokens and arguments at the edge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import ACTIVATION_OPTIONS, Case, assert_matches_reference, make_case
from tvm_moe import MoEError, reference


def numpy_relu2(case):
    """INT8 with relu2, where every operation is one exact or correctly rounded one: no bound needed."""
    f32, w13, w2 = np.float32, case.w13.numpy().astype(np.int32), case.w2.numpy().astype(np.int32)
    s13, s2 = case.options["w13_scale"].numpy(), case.options["w2_scale"].numpy()
    b13, b2 = case.options["w13_bias"].numpy(), case.options["w2_bias"].numpy()

    def linear(x, w, scale, bias):
        x_scale = np.maximum(np.abs(x).max(), f32(1e-7)) / f32(127)
        q = np.clip(np.rint(x / x_scale), -127, 127).astype(np.int32)
        return (w @ q).astype(f32) * (x_scale * scale) + bias

    out = np.zeros(case.x.shape, f32)
    for t, x in enumerate(case.x.numpy()):
        for weight, e in zip(case.weights[t].numpy(), case.ids[t].tolist(), strict=True):
            h = np.maximum(linear(x, w13[e], s13[e], b13[e]), f32(0)) ** 2
            out[t] += weight * linear(h, w2[e], s2[e], b2[e])
    return torch.from_numpy(out)


def test_int8_equals_integer_arithmetic_bit_for_bit():
    case = make_case(T=40, H=70, I=50, weights="int8", x_dtype=torch.float32, bias=True, activation="relu2")
    assert -128 in case.w13
    assert torch.equal(case.reference(), numpy_relu2(case))


def test_int8_takes_minus_128_and_sums_beyond_f32():
    """The exact sum has 26 significant bits and its terms are odd by turns: f32 additions round on the way."""
    K = 4099
    x, w13 = torch.full((1, K), -127.0), torch.full((1, 1, K), -128, dtype=torch.int8)
    w13[..., ::2] = -127
    products = (x * w13[0]).numpy()[0]
    exact = int(products.astype(np.int64).sum())
    assert np.add.accumulate(products, dtype=np.float32)[-1] != np.float32(exact)

    w2 = torch.full((1, K, 1), -128, dtype=torch.int8)
    options = {"activation": "relu2", "w13_scale": torch.ones(1, 1), "w2_scale": torch.ones(1, K, 1)}
    case = Case(x, w13, w2, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), options)
    h = np.float32(exact) ** 2
    assert case.reference().tolist() == [[float(np.float32(-127 * 128) * (h / np.float32(127)))] * K]


def test_quantizing_float_weights_is_quantize_weight():
    case = make_case(weights="f32", bias=True, dtype="int8")
    (w13, s13), (w2, s2) = reference.quantize_weight(case.w13), reference.quantize_weight(case.w2)
    options = case.options | {"dtype": None, "w13_scale": s13[..., None], "w2_scale": s2}
    assert torch.equal(case.reference(), case.but(w13=w13, w2=w2, options=options).reference())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("options", ACTIVATION_OPTIONS, ids=str)
def test_float_layers_equal_a_plain_loop(options, dtype):
    """f32 sums by torch, one (token, slot) at a time."""
    case = make_case(weights="f32", x_dtype=torch.float32, bias=True, dtype=dtype, **options)
    cast = (lambda v: v) if dtype == "f32" else (lambda v: v.bfloat16().float())
    out = torch.zeros_like(case.x)
    for t in range(len(case.x)):
        for w, e in zip(case.weights[t], case.ids[t], strict=True):
            g_u = F.linear(cast(case.x[t]), cast(case.w13[e]), case.options["w13_bias"][e])
            h = reference.activate(g_u, case.spec, options.get("interleaved", False))
            out[t] += w * F.linear(cast(h), cast(case.w2[e]), case.options["w2_bias"][e])
    assert_matches_reference(out, case)


def test_bf16_is_the_default_and_rounds_operands():
    case = make_case(weights="f32", x_dtype=torch.float32)
    rounded = case.but(x=case.x.bfloat16().float(), w13=case.w13.bfloat16(), w2=case.w2.bfloat16())
    assert torch.equal(case.reference(), rounded.reference())
    assert not torch.equal(case.reference(), case.but(options={"dtype": "f32"}).reference())


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_output_is_rounded_once_to_the_inputs_dtype(weights, x_dtype):
    case = make_case(weights=weights, x_dtype=x_dtype)
    assert torch.equal(case.reference(), case.but(x=case.x.float()).reference().to(x_dtype))


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_skipped_slots_contribute_nothing(weights):
    case = make_case(T=4, k=3, E=4, weights=weights, bias=True, x_dtype=torch.float32)
    case.ids[0, 1], case.ids[1, 0], case.ids[2] = -1, 4, torch.tensor([-7, 2**31 - 1, -(2**31)])
    want = case.reference()
    skipped = (case.ids < 0) | (case.ids >= 4)
    poisoned = case.but(weights=case.weights.masked_fill(skipped, math.nan))
    assert torch.equal(poisoned.reference(), want)
    assert want[2].tolist() == [0.0] * 24
    kept = case.but(x=case.x[:1], ids=case.ids[:1, [0, 2]], weights=case.weights[:1, [0, 2]])
    assert torch.equal(kept.reference(), want[:1])


def test_an_expert_named_twice_counts_twice():
    case = make_case(T=1, k=1, x_dtype=torch.float32)
    twice = case.but(ids=case.ids.repeat(1, 2), weights=case.weights.repeat(1, 2))
    assert torch.equal(twice.reference(), 2 * case.reference())


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_token_breaks_no_other(weights, bad):
    case = make_case(T=6, E=2, weights=weights)
    want = case.reference()
    case.x[3, 5] = bad
    got = case.reference()
    others = [0, 1, 2, 4, 5]
    assert torch.equal(got[others], want[others])
    assert got[3].isnan().all() if weights == "int8" or bad != bad else not got[3].isfinite().all()


@pytest.mark.parametrize("weights", ["f32", "int8"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_no_tokens(weights, k):
    case = make_case(T=0, k=k, weights=weights, bias=True)
    assert case.reference().shape == (0, 24)
    assert case.reference().dtype == torch.bfloat16


def test_weight_on_input():
    case = make_case(k=1, x_dtype=torch.float32, bias=True, on_input=True)
    case.weights.uniform_(0.2, 0.9, generator=torch.Generator().manual_seed(0))
    by_hand = case.but(x=case.x * case.weights, weights=torch.ones_like(case.weights), on_input=False)
    assert torch.equal(case.reference(), by_hand.reference())
    assert not torch.allclose(case.reference(), case.but(on_input=False).reference(), atol=1e-2)
    with pytest.raises(MoEError, match=r"one expert a token.*k=2"):
        make_case(k=2, on_input=True).reference()


def test_strides_parameters_and_arguments():
    case = make_case(T=6, bias=True)
    wide_w, wide_i = torch.cat([case.weights, case.weights], 1), torch.cat([case.ids, case.ids], 1).long()
    strided = case.but(
        x=torch.cat([case.x, case.x]).T.contiguous().T[:6],
        w13=torch.nn.Parameter(case.w13.transpose(1, 2).contiguous().transpose(1, 2)),
        weights=wide_w[:, :2],
        ids=wide_i[:, :2],
    )
    before = [v.clone() for v in (strided.x, strided.w13, strided.w2, strided.weights, strided.ids)]
    assert torch.equal(strided.reference(), case.reference())
    assert not strided.reference().requires_grad
    after = (strided.x, strided.w13, strided.w2, strided.weights, strided.ids)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_bf16_routing_weights_are_converted():
    case = make_case(x_dtype=torch.float32)
    narrow = case.weights.bfloat16()
    assert torch.equal(case.but(weights=narrow).reference(), case.but(weights=narrow.float()).reference())


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"dtype": "fp8"}, "dtype 'fp8'.*bf16"),
        ({}, {"activation": "mish"}, "unknown activation"),
        ({}, {"alpha": 2.0}, "takes no alpha"),
        ({}, {"activation": "swiglustep"}, "needs a limit"),
        ({}, {"w13_scale": torch.ones(4, 40)}, "floating weights none"),
        ({"w13": torch.zeros(4, 40, 24, dtype=torch.int8)}, {}, "int8.*bfloat16"),
        ({"w13": torch.zeros(4, 40, 24, dtype=torch.int32)}, {}, "int32"),
    ],
)
def test_errors(changes, options, message):
    with pytest.raises(MoEError, match=message):
        make_case().but(**changes, options=options).reference()


def test_int8_weights_stay_int8():
    case = make_case(weights="int8")
    with pytest.raises(MoEError, match=r"bf16.*int8 for int8"):
        case.but(options=case.options | {"dtype": "bf16"}).reference()
    with pytest.raises(MoEError, match="need both scales"):
        case.but(options={"w2_scale": case.options["w2_scale"]}).reference()
