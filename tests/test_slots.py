"""What ids and routing weights may be: skipped, repeated, crowded, absent, of any integer width and any strides."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tvm_moe
from tests.helpers import U, assert_matches_reference, assert_within, make_case
from tvm_moe import fused_moe, pack_linear, plan
from tvm_moe.api import by_slots

F32, ROOT = torch.float32, Path(__file__).parent.parent


@pytest.mark.parametrize("bad", [-1, -7, 4, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_ids_outside_are_skipped(kernel, bad, id_dtype):
    """The slot may not even be read: its weight is NaN, and so is what it would find in a neighbour's place."""
    case = make_case(T=9, E=4, k=3, H=66, I=20, bias=True, x_dtype=F32, dtype=kernel.dtype)
    case = case.but(ids=case.ids.to(id_dtype))
    case.ids[0, 0], case.ids[1, 1], case.ids[2, 2], case.ids[3] = bad, bad, bad, bad
    case.ids[4, :2] = bad
    got = case.run(case.pack(kernel))
    assert_matches_reference(got, case)
    assert got[3].eq(0).all()
    assert torch.equal(
        case.but(weights=case.weights.masked_fill(case.ids == bad, math.nan)).run(case.pack(kernel)), got
    )


@pytest.mark.parametrize("high", [2**32, -(2**32), 2**33, 2**62])
def test_wide_ids_do_not_wrap(kernel, high):
    """Their low 32 bits are those of an expert."""
    case = make_case(T=5, E=4, k=2, x_dtype=F32, dtype=kernel.dtype)
    case = case.but(ids=case.ids.long())
    case.ids[1, 0] += high
    case.ids[2] += high
    got = case.run(case.pack(kernel))
    assert_matches_reference(got, case)
    assert got[2].eq(0).all()


@pytest.mark.parametrize("T", [1, 9, 64])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, F32])
def test_all_skipped_gives_zeros(kernel, T, x_dtype):
    case = make_case(T=T, H=70, k=2, bias=True, x_dtype=x_dtype, dtype=kernel.dtype)
    case.ids.fill_(-1)
    out = torch.full_like(case.x, math.nan)
    assert case.run(case.pack(kernel), out).eq(0).all()


def test_no_slots_give_zeros(kernel):
    case = make_case(T=3, k=2, dtype=kernel.dtype)
    none = case.but(ids=case.ids[:, :0], weights=case.weights[:, :0])
    assert none.run(case.pack(kernel), torch.full_like(case.x, math.nan)).eq(0).all()


def test_an_expert_named_twice_counts_twice(kernel):
    case = make_case(T=9, k=1, x_dtype=F32, dtype=kernel.dtype)
    twice = case.but(ids=case.ids.repeat(1, 2), weights=case.weights.repeat(1, 2))
    packed = case.pack(kernel)
    assert torch.equal(twice.run(packed), 2 * case.run(packed))
    unequal = twice.but(weights=torch.cat([case.weights, 2 * case.weights], 1))
    assert_matches_reference(unequal.run(packed), unequal)


def test_slots_are_summed_in_their_order(kernel):
    """(1 + 2^-24) - 1 is 0 in f32, (1 - 1) + 2^-24 is not: expert order would give the other one."""
    case = make_case(T=3, E=3, k=3, activation="relu2", x_dtype=F32, dtype=kernel.dtype)
    case = case.but(w13=torch.zeros_like(case.w13), options=case.options | {"w2_bias": torch.ones(3, 24)})
    case = case.but(weights=torch.tensor([1.0, 2.0**-24, -1.0]).repeat(3, 1))
    for order, want in (([0, 1, 2], 0.0), ([2, 0, 1], 0.0), ([1, 2, 0], 0.0)):
        shuffled = case.but(ids=torch.tensor([order] * 3, dtype=torch.int32))
        assert shuffled.run(case.pack(kernel)).eq(want).all()
    other = case.but(weights=case.weights[:, [0, 2, 1]], ids=torch.tensor([[0, 1, 2]] * 3, dtype=torch.int32))
    assert other.run(case.pack(kernel)).eq(2.0**-24).all()


@pytest.mark.parametrize("expert", [0, 3, 6])
def test_one_hot_expert(kernel, expert):
    """More rows than a block holds, all of one expert, and experts without tokens on either side."""
    case = make_case(T=421, E=7, k=2, H=66, I=35, x_dtype=F32, dtype=kernel.dtype)
    case.ids[:] = expert
    assert_matches_reference(case.run(case.pack(kernel)), case)


@pytest.mark.parametrize("T", [1, 2, 64])
def test_experts_without_tokens(kernel, T):
    case = make_case(T=T, E=64, k=2, H=40, I=20, x_dtype=F32, dtype=kernel.dtype)
    case.ids[:] = torch.tensor([61, 2])
    assert_matches_reference(case.run(case.pack(kernel)), case)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_weights_and_ids_that_are_slices(kernel, id_dtype):
    case = make_case(T=9, k=2, x_dtype=F32, dtype=kernel.dtype)
    packed = case.pack(kernel)
    wide_weights = torch.cat([case.weights, torch.full((9, 3), math.nan)], 1)
    wide_ids = torch.cat([case.ids, torch.ones(9, 3)], 1).to(id_dtype)
    sliced = case.but(weights=wide_weights[:, :2], ids=wide_ids[:, :2])
    turned = case.but(weights=case.weights.T.contiguous().T, ids=case.ids.to(id_dtype).T.contiguous().T)
    for view in (sliced, turned):
        assert not view.ids.is_contiguous()
        assert torch.equal(view.run(packed), case.run(packed))
    expanded = case.but(weights=case.weights[:, :1].expand(9, 2), ids=wide_ids[:1, :2].expand(9, 2))
    assert_matches_reference(expanded.run(packed), expanded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_routing_weights_are_converted(kernel, dtype):
    case = make_case(T=9, x_dtype=F32, dtype=kernel.dtype)
    narrow = case.weights.to(dtype)
    packed = case.pack(kernel)
    assert torch.equal(case.but(weights=narrow).run(packed), case.but(weights=narrow.float()).run(packed))


def test_more_slots_than_experts(kernel):
    case = make_case(T=5, E=1, k=1, H=40, dtype=kernel.dtype)
    many = case.but(ids=torch.zeros(5, 9, dtype=torch.int32), weights=torch.full((5, 9), 1 / 9))
    assert_matches_reference(many.run(case.pack(kernel)), many)


GUARDED = """
import ctypes, mmap
from tests.helpers import assert_matches_reference, make_case
from tvm_moe import isa, kernels, runtime
from tvm_moe.plan import Field

def guarded(size):
    '''Address of so many bytes right after a page that cannot be read; they stay mapped.'''
    page = mmap.PAGESIZE
    ROOMS.append(mmap.mmap(-1, page + size))
    start = ctypes.addressof(ctypes.c_char.from_buffer(ROOMS[-1]))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), page, 0) == 0
    return start + page

ROOMS = []
for kernel in (k for k in kernels.TABLE if isa.executable(k)[0]):
    for H in (kernel.NR, kernel.NR - 1):
        case = make_case(T=4, k=2, H=H, I=20, dtype=kernel.dtype)
        case.ids[0, 0], case.ids[2] = -1, -1
        layer = case.pack(kernel).layer
        out = case.x.clone()
        plan = layer.run(case.x, out, case.weights, case.ids)
        size = plan[Field.RING_Y] * plan[Field.GROUP2] * 8 * kernel.NR * 4
        plan.values[Field.AT_Y] = guarded(size) - runtime._scratch.take(plan.scratch_bytes)[1]
        layer.run(case.x, out.zero_(), case.weights, case.ids)
        assert_matches_reference(out, case)
"""


def test_skipped_slots_read_nothing_before_the_results():
    """Their position is -1: a row that is not there, and that vector code reads before it drops it."""
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr or done.returncode


def packed_and_rows(kernel, kind, T, k):
    """A layer, f32 rows for it and a case with ids and weights [T, k]; some slots are skipped."""
    case = make_case(T=T, E=5, k=k, H=70, I=40, bias=kind == "fused", x_dtype=F32, dtype=kernel.dtype)
    case.ids[0, 0] = case.ids[T // 2, -1] = -1
    packed = case.pack(kernel) if kind == "fused" else pack_linear(case.w2, dtype=kernel.dtype, isa=kernel.isa)
    return case, packed, torch.randn(T * k, packed.input_size)


KINDS = pytest.mark.parametrize("kind", ["fused", "linear"])


@KINDS
@pytest.mark.parametrize(("T", "k"), [(1, 1), (1, 3), (40, 3), (7, 5)])
def test_a_row_may_serve_several_slots(kernel, kind, T, k):
    """One id a slot, as if the row had been repeated for each."""
    case, packed, rows = packed_and_rows(kernel, kind, T, k)
    ids, ones = case.ids.reshape(-1, 1), torch.ones(T * k, 1)
    want = fused_moe(rows[:T].repeat_interleave(k, 0), packed, ones, ids)
    assert torch.equal(by_slots(rows[:T], packed, ones, ids), want)


@KINDS
@pytest.mark.parametrize(("T", "k"), [(1, 3), (40, 3), (7, 5)])
def test_each_slot_may_have_its_own_row(kernel, kind, T, k):
    case, packed, rows = packed_and_rows(kernel, kind, T, k)
    terms = fused_moe(rows, packed, torch.ones(T * k, 1), case.ids.reshape(-1, 1)).double().view(T, k, -1)
    terms = terms * case.weights[..., None]
    # Of a slot: its result, the scale with the weight, the product and the sum, each rounded.
    assert_within(by_slots(rows, packed, case.weights, case.ids), terms.sum(1), (k + 4) * U * terms.abs().sum(1))


@KINDS
def test_parts_hold_whole_rows(kernel, kind, monkeypatch):
    T, k = 150, 3
    case, packed, rows = packed_and_rows(kernel, kind, T, k)
    _, again, _ = packed_and_rows(kernel, kind, T, k)
    ids, ones = case.ids.reshape(-1, 1), torch.ones(T * k, 1)
    whole = by_slots(rows[:T], packed, ones, ids), by_slots(rows, packed, case.weights, case.ids)
    monkeypatch.setattr(plan, "PART_ROWS", 20)
    monkeypatch.setattr(plan, "PART_BYTES", 1)
    threads, layer = tvm_moe.get_num_threads(), again.layer
    cut = plan.parts(kernel, layer.sizes, T * k, 1, threads, k)
    assert len(cut) > 2
    assert all((end - begin) % k == 0 for begin, end in cut)
    assert len(plan.parts(kernel, layer.sizes, T, k, threads, 1)) > 2
    assert torch.equal(by_slots(rows[:T], again, ones, ids), whole[0])
    assert torch.equal(by_slots(rows, again, case.weights, case.ids), whole[1])


def test_no_slots_at_all():
    packed = make_case(T=2).pack()
    none = torch.empty(0, 2)
    assert by_slots(torch.empty(0, packed.input_size), packed, none, none.int()).shape == (0, packed.hidden_size)
