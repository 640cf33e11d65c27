"""Whole layers against the reference: every activation, size, dtype and memory layout, chosen pairwise."""

from __future__ import annotations

import pytest
import torch

import tvm_moe
from tests.conftest import rows
from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tests.pairwise import pairwise
from tvm_moe import kernels, plan
from tvm_moe.expert_weights import INT8_MAX_K
from tvm_moe.kernels import DTYPES
from tvm_moe.plan import Field

SIZES = (1, 7, 66, 176, 352, 360, 704)  # 1408 / 4 and / 8 among them: what tensor parallelism leaves
STORED = {"bf16": ("bf16", "f16", "f32"), "int8": ("int8", "bf16", "f16", "f32")}


def strided(tensor, layout):
    """The same values with other strides."""
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":  # a part of something larger: no row starts where the last one ended, all are misaligned
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), 99).to(tensor.dtype)
        wide[..., 1 : 1 + tensor.shape[-1]] = tensor
        return wide[..., 1 : 1 + tensor.shape[-1]]
    if layout == "every other":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    return tensor


LAYOUTS = ("contiguous", "transposed", "sliced", "every other")


def cases(kernel):
    return pairwise(
        options=[*ACTIVATION_OPTIONS, {"activation": "silu", "interleaved": True}],
        bias=[True, False],
        T=[0, 1, 2, kernel.MR, kernel.MR + 1, 64, 121],
        H=SIZES,
        I=SIZES,
        k=[1, 2, 4],
        weights=STORED[kernel.dtype],
        x_dtype=[torch.bfloat16, torch.float16, torch.float32],
        id_dtype=[torch.int32, torch.int64],
        x_layout=LAYOUTS,
        w_layout=LAYOUTS,
    )


ALL = [
    pytest.param(kernel.values[0], case, id=f"{kernel.id}-{i}", marks=kernel.marks)
    for kernel in rows(*DTYPES)
    for i, case in enumerate(cases(kernel.values[0]))
]


@pytest.mark.parametrize(("kernel", "row"), ALL)
def test_layers_equal_the_reference(kernel, row):
    options, sizes = row["options"], {name: row[name] for name in ("T", "H", "I", "k", "bias", "weights", "x_dtype")}
    case = make_case(E=5, **sizes, dtype=kernel.dtype, **options)
    moved = case.but(
        x=strided(case.x, row["x_layout"]),
        w13=strided(case.w13, row["w_layout"]),
        w2=strided(case.w2, row["w_layout"]),
        ids=case.ids.to(row["id_dtype"]),
    )
    got = moved.run(moved.pack(kernel))
    assert got.dtype == row["x_dtype"]
    assert got.is_contiguous()
    assert_matches_reference(got, case)


@pytest.mark.parametrize("bias", ["w13_bias", "w2_bias"])
def test_one_bias_without_the_other(kernel, bias):
    case = make_case(H=66, I=35, bias=True, x_dtype=torch.float32, dtype=kernel.dtype)
    case = case.but(options={name: value for name, value in case.options.items() if name in (bias, "dtype")})
    assert_matches_reference(case.run(case.pack(kernel)), case)


@pytest.mark.parametrize("options", ACTIVATION_OPTIONS, ids=str)
def test_an_intermediate_of_176(kernel, options):
    """704 over four shards: a multiple of no panel."""
    case = make_case(T=9, H=40, I=176, bias=True, x_dtype=torch.float32, dtype=kernel.dtype, **options)
    assert_matches_reference(case.run(case.pack(kernel)), case)


@pytest.mark.parametrize("layout", ["transposed view", "transposed copy"])
def test_a_square_down_projection_is_read_as_its_strides_say(kernel, layout):
    case = make_case(H=48, I=48, x_dtype=torch.float32, dtype=kernel.dtype)
    turned = case.w2.transpose(1, 2)
    case = case.but(w2=turned if layout == "transposed view" else turned.contiguous())
    got = case.run(case.pack(kernel))
    assert_matches_reference(got, case)
    with pytest.raises(AssertionError, match="outside"):
        assert_matches_reference(got, case.but(w2=case.w2.transpose(1, 2)))


def test_scales_and_biases_of_other_dtypes_and_shapes(int8_kernel):
    case = make_case(H=66, I=35, weights="int8", bias=True, x_dtype=torch.float32)
    narrow = {n: v.bfloat16()[..., None] for n, v in case.options.items()}
    wide = {n: v.float().transpose(0, 1).contiguous().transpose(0, 1)[..., 0] for n, v in narrow.items()}
    one, other = case.but(options=narrow), case.but(options=wide)
    assert torch.equal(one.run(one.pack(int8_kernel)), other.run(other.pack(int8_kernel)))
    assert_matches_reference(one.run(one.pack(int8_kernel)), other)


def test_int8_is_the_default_for_int8_weights_and_bf16_for_the_others():
    assert make_case(weights="int8").pack().dtype == "int8"
    assert {make_case(weights=kind).pack().dtype for kind in ("bf16", "f16", "f32")} == {"bf16"}


def test_the_weight_on_the_input(kernel):
    case = make_case(T=9, k=1, H=66, I=35, bias=True, x_dtype=torch.float32, on_input=True, dtype=kernel.dtype)
    case.weights.uniform_(0.2, 0.9, generator=torch.Generator().manual_seed(0))
    packed = case.pack(kernel)
    assert_matches_reference(case.run(packed), case)
    by_hand = case.but(x=case.x * case.weights, weights=torch.ones_like(case.weights), on_input=False)
    assert torch.equal(case.run(packed), by_hand.run(packed))
    assert not torch.equal(case.run(packed), case.but(on_input=False).run(packed))


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out(kernel, x_dtype, layout):
    """Written whole, returned, and nothing beside it is touched."""
    case = make_case(T=9, H=70, I=20, x_dtype=x_dtype, dtype=kernel.dtype)
    packed = case.pack(kernel)
    want = case.run(packed)
    out = strided(torch.zeros_like(case.x), layout)
    storage = torch.tensor([], dtype=out.dtype).set_(out.untyped_storage())
    storage.fill_(3)
    assert case.run(packed, out) is out
    assert torch.equal(out, want)
    out.fill_(3)
    assert storage.eq(3).all()


def test_rows_and_results_may_lie_more_than_2_to_31_apart(kernel):
    """A few rows of two enormous tensors, most of which is never touched; row 8 starts at element 2^31."""
    case = make_case(T=17, H=66, I=20, dtype=kernel.dtype)
    x, out = (torch.empty(2**32 + 66, dtype=torch.bfloat16).as_strided((17, 66), (2**28, 1)) for _ in range(2))
    x.copy_(case.x)
    packed = case.pack(kernel)
    assert torch.equal(case.but(x=x).run(packed, out), case.run(packed))


def test_more_rows_and_results_than_fit_the_rings(kernel):
    """Blocks and panel groups take turns in the scratch memory; one expert gets most rows."""
    case = make_case(T=1500, E=8, H=704, I=40, k=8, x_dtype=torch.float32, dtype=kernel.dtype)
    case.ids[:, 2:] = 3
    packed = case.pack(kernel)
    cut = plan.make(kernel, packed.layer.sizes, 1500, 8, tvm_moe.get_num_threads(), 704, 704)
    assert cut[Field.RING_Y] < cut[Field.ITEMS2]
    if kernel.dtype == "int8":  # BF16 rounds its intermediate at once
        assert cut[Field.RING_H] < 1500 * 8 // cut[Field.ROW_BLOCK]
    assert_matches_reference(case.run(packed), case)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_parts_give_the_same_bits(kernel, x_dtype, ids_dtype, monkeypatch):
    """Rows further apart than H, k = 3, parts of 37 and 38 tokens: each finds its own rows in every array."""
    case = make_case(T=150, E=4, H=66, I=40, k=3, x_dtype=x_dtype, dtype=kernel.dtype)
    case = case.but(ids=case.ids.to(ids_dtype), x=strided(case.x, "sliced"))
    whole = case.run(case.pack(kernel))
    threads = tvm_moe.get_num_threads()
    monkeypatch.setattr(plan, "PART_ROWS", 25)
    monkeypatch.setattr(plan, "PART_BYTES", 1)
    packed = case.pack(kernel)
    assert [end - begin for begin, end in plan.parts(kernel, packed.layer.sizes, 150, 3, threads)] == [37, 38, 37, 38]
    first, again, out = case.run(packed), case.run(packed), torch.full((150, 132), 7.0).to(x_dtype)
    assert torch.equal(first, whole)
    assert torch.equal(again, whole)
    assert torch.equal(case.run(packed, out[:, ::2]), whole)
    assert out[:, 1::2].eq(7).all()


def test_parts_are_no_smaller_than_pays():
    kernel, sizes = kernels.find("avx512_vnni", "int8"), plan.LayerSizes(128, 2048, 768, True)
    assert len(plan.parts(kernel, sizes, 1024, 8, 1)) == 1  # 64 rows an expert
    assert len(plan.parts(kernel, sizes, 4096, 8, 2)) == 2  # 25 MB, and 128 rows an expert
    assert len(plan.parts(kernel, sizes, 4096, 8, 16)) == 1
    assert plan.parts(kernel, sizes, 0, 8, 2) == [(0, 0)]
    assert plan.parts(kernel, plan.LayerSizes(1, 8, 60_000, True), 2, 600, 1) == [(0, 1), (1, 2)]  # none is empty
    scratch = [plan.make(kernel, sizes, max(b - a for a, b in plan.parts(kernel, sizes, T, 8, 2)), 8, 2, 2048, 2048)
               for T in (4096, 262_144)]  # fmt: skip
    assert scratch[1].scratch_bytes < 1.5 * scratch[0].scratch_bytes


def test_int8_sums_over_the_largest_k(int8_kernel):
    """The extremes of int8 over 132,000 products: the shifted sums of u8 kernels pass 2^31 on the way."""
    K = INT8_MAX_K
    x = torch.full((2, K), 127.0)
    x[1] = -127
    w13 = torch.full((1, 1, K), -128, dtype=torch.int8)
    options = {"activation": "relu2", "w13_scale": torch.full((1, 1), 2.0**-31), "w2_scale": torch.ones(1, K)}
    case = make_case(T=2, E=1, H=4, I=1, k=1).but(
        x=x, w13=w13, w2=torch.ones(1, K, 1, dtype=torch.int8), weights=torch.ones(2, 1), options=options
    )
    got = case.run(case.pack(int8_kernel))
    assert got[0].eq(0).all()
    assert got[1].gt(0).all()
    assert_matches_reference(got, case)
