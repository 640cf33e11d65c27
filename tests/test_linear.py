"""`pack_linear`: grouped products without gate/up projections."""

from __future__ import annotations

import pytest
import torch

import tvm_moe
from tests.helpers import U, assert_within, random_ids, random_weight
from tvm_moe import MoEError, PackedExperts, reference

SIZES = [(1, 1, 1, 1), (5, 3, 7, 2), (64, 33, 100, 4), (200, 130, 65, 3)]  # T, N, K, E


def make(T, N, K, E, kind="bf16", x_dtype=torch.float32):
    rng = torch.Generator().manual_seed(T + N)
    w, scale = random_weight(rng, E, N, K, kind)
    x = torch.randn(T, K, generator=rng).to(x_dtype)
    k = min(2, E)
    return x, w, scale, torch.rand(T, k, generator=rng), random_ids(rng, T, E, k)


def product(x, w, scale, dtype):
    """Of one row set and one expert, in f64 of the operands as the kernels round them, and its magnitude."""
    if dtype == "bf16":
        a, b, factor = x.float().bfloat16().double(), w.bfloat16().double(), torch.ones(())
    else:
        q, s = reference.quantize_rows(x.float())
        w, scale = reference.quantize_weight(w) if scale is None else (w, scale)
        a, b, factor = q.double(), w.double(), s.double()[:, None] * scale.double()
    return a @ b.T * factor, a.abs() @ b.T.abs() * factor


def expected(x, w, scale, bias, weights, ids, dtype):
    """f64 [T, N] and what f32 may err by: K roundings of the sum, three of the scales, one a term of the combination."""
    total = torch.zeros(len(x), w.shape[1], dtype=torch.float64)
    bound = torch.zeros_like(total)
    for t, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        e = int(ids[t, j])
        if not 0 <= e < len(w):
            continue
        y, size = product(x[t : t + 1], w[e], None if scale is None else scale[e], dtype)
        extra = torch.zeros(()) if bias is None else bias[e].double()
        total[t] += weights[t, j].double() * (y[0] + extra)
        roundings = (x.shape[1] if dtype == "bf16" else 3) + 4 + ids.shape[1]
        bound[t] += roundings * U * weights[t, j].double() * (size[0] + extra.abs())
    return total, bound + torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_products(sizes, bias, kernel):
    x, w, scale, weights, ids = make(*sizes)
    b = torch.randn(w.shape[:2]) if bias else None
    packed = tvm_moe.pack_linear(w, bias=b, dtype=kernel.dtype, isa=kernel.isa)
    assert (packed.hidden_size, packed.input_size, packed.activation) == (w.shape[1], w.shape[2], "linear")
    got = tvm_moe.fused_moe(x, packed, weights, ids)
    assert_within(got, *expected(x, w, scale, b, weights, ids, kernel.dtype))


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_the_input(x_dtype, kernel):
    x, w, _, weights, ids = make(9, 40, 24, 3, x_dtype=x_dtype)
    packed = tvm_moe.pack_linear(w, dtype=kernel.dtype, isa=kernel.isa)
    got = tvm_moe.fused_moe(x, packed, weights, ids)
    whole = tvm_moe.fused_moe(x.float(), packed, weights, ids)
    assert got.dtype == x_dtype
    assert torch.equal(got, whole.to(x_dtype))


def test_int8_weights_with_scales(int8_kernel):
    x, w, scale, weights, ids = make(20, 50, 70, 4, "int8")
    packed = tvm_moe.pack_linear(w, scale=scale, isa=int8_kernel.isa)
    got = tvm_moe.fused_moe(x, packed, weights, ids)
    assert_within(got, *expected(x, w, scale, None, weights, ids, "int8"))


def test_skipped_ids_and_no_tokens(kernel):
    x, w, scale, weights, ids = make(12, 40, 24, 3)
    ids[::2, 0], ids[5] = -1, 3
    packed = tvm_moe.pack_linear(w, dtype=kernel.dtype, isa=kernel.isa)
    got = tvm_moe.fused_moe(x, packed, weights, ids)
    assert_within(got, *expected(x, w, scale, None, weights, ids, kernel.dtype))
    assert (got[5] == 0).all()
    assert tvm_moe.fused_moe(x[:0], packed, weights[:0], ids[:0]).shape == (0, 40)


def test_results_do_not_depend_on_the_batch_or_the_threads(kernel, set_num_threads):
    x, w, _, weights, ids = make(70, 96, 48, 3)
    packed = tvm_moe.pack_linear(w, dtype=kernel.dtype, isa=kernel.isa)
    set_num_threads(2)
    want = tvm_moe.fused_moe(x, packed, weights, ids)
    set_num_threads(1)
    alone = [tvm_moe.fused_moe(x[t : t + 1], packed, weights[t : t + 1], ids[t : t + 1]) for t in range(len(x))]
    assert torch.equal(torch.cat(alone), want)


def test_out_and_strided_inputs(kernel):
    x, w, _, weights, ids = make(9, 40, 24, 3)
    packed = tvm_moe.pack_linear(w.transpose(1, 2).contiguous().transpose(1, 2), dtype=kernel.dtype, isa=kernel.isa)
    want = tvm_moe.fused_moe(x, packed, weights, ids)
    out = torch.full((9, 40), 7.0)
    assert tvm_moe.fused_moe(x.T.contiguous().T, packed, weights, ids, out=out) is out
    assert torch.equal(out, want)


def test_saved_and_repacked(tmp_path):
    x, w, _, weights, ids = make(9, 40, 24, 3)
    packed = tvm_moe.pack_linear(w, dtype="int8", bias=torch.randn(3, 40))
    packed.save(tmp_path / "linear")
    for isa in (None, "generic"):
        loaded = PackedExperts.load(tmp_path / "linear", isa)
        got, want = (tvm_moe.fused_moe(x, p, weights, ids) for p in (loaded, packed))
        assert_within(got, want, 4 * U * want.abs().double() + 1e-6)  # levels agree but for f32 roundings
    assert "linear" in repr(loaded)
    assert tvm_moe.explain(packed)


def test_what_it_refuses():
    x, w, scale, weights, ids = make(9, 40, 24, 3, "int8")
    packed = tvm_moe.pack_linear(w, scale=scale)
    with pytest.raises(MoEError, match="40 columns, these experts have hidden size 24"):
        tvm_moe.fused_moe(torch.zeros(9, 40), packed, weights, ids)
    with pytest.raises(MoEError, match=r"out is .*expected \(9, 40\)"):
        tvm_moe.fused_moe(x, packed, weights, ids, out=torch.zeros(9, 24))
    with pytest.raises(MoEError, match="apply_router_weight_on_input is not for what pack_linear made"):
        tvm_moe.fused_moe(x, packed, weights[:, :1], ids[:, :1], True)
    with pytest.raises(MoEError, match="w must be a dense 3-D torch tensor"):
        tvm_moe.pack_linear(w[0])
    with pytest.raises(MoEError, match="w2_scale is missing"):
        tvm_moe.pack_linear(w)
    with pytest.raises(MoEError, match=r"bias has shape \(3, 24\), expected \(3, 40\)"):
        tvm_moe.pack_linear(w, scale=scale, bias=torch.zeros(3, 24))
    with pytest.raises(MoEError, match="unknown activation 'linear'"):
        tvm_moe.pack_experts(torch.zeros(3, 8, 24), torch.zeros(3, 24, 8), activation="linear")
