"""Any small layer, call and memory layout that hypothesis can think of against the reference."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tests.test_layer import LAYOUTS, STORED, strided
from tvm_moe import PackedExperts, isa, kernels, packing

EXECUTABLE = [k for k in kernels.TABLE if isa.executable(k)[0]]
SETTINGS = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SIZES = st.integers(1, 140)


@st.composite
def layers(draw):
    """A row of the table, a case that it can pack (with its own memory layouts), and the same case laid out plainly."""
    kernel = draw(st.sampled_from(EXECUTABLE))
    E, k = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    case = make_case(
        T=draw(st.integers(0, 20)), E=E, H=draw(SIZES), I=draw(SIZES), k=min(k, E),
        weights=draw(st.sampled_from(STORED[kernel.dtype])), bias=draw(st.booleans()), seed=draw(st.integers(0, 99)),
        x_dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        dtype=kernel.dtype, **draw(st.sampled_from(ACTIVATION_OPTIONS)),
    )  # fmt: skip
    id_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    slots = case.ids.numel()
    ids = draw(
        st.lists(st.one_of(st.integers(-2, E), st.integers(-(2**31), 2**31 - 1)), min_size=slots, max_size=slots)
    )
    case = case.but(ids=torch.tensor(ids, dtype=id_dtype).view(case.ids.shape))
    layouts = st.sampled_from(LAYOUTS)
    moved = {name: strided(getattr(case, name), draw(layouts)) for name in ("x", "w13", "w2", "weights", "ids")}
    return kernel, case.but(**moved), case


@SETTINGS
@given(layers())
def test_any_layer_equals_the_reference(drawn):
    kernel, moved, case = drawn
    assert_matches_reference(moved.run(moved.pack(kernel)), case)


@SETTINGS
@given(layers(), st.data())
def test_a_token_does_not_depend_on_the_others(drawn, data):
    """Any selection of tokens, in any order and with repetitions, gives the selected results."""
    kernel, case, _ = drawn
    T = len(case.x)
    chosen = data.draw(st.lists(st.integers(0, T - 1), max_size=12)) if T else []
    packed = case.pack(kernel)
    some = case.but(x=case.x[chosen], weights=case.weights[chosen], ids=case.ids[chosen])
    assert torch.equal(some.run(packed), case.run(packed)[chosen])


@SETTINGS
@given(layers(), st.data())
def test_experts_may_be_renumbered(drawn, data):
    kernel, case, _ = drawn
    E = len(case.w13)
    order = data.draw(st.permutations(range(E)))
    inside = (case.ids >= 0) & (case.ids < E)
    ids = torch.where(inside, torch.tensor(order).argsort()[case.ids.long().clamp(0, E - 1)], -1)
    vectors = {n: v[order] for n, v in case.options.items() if isinstance(v, torch.Tensor)}
    other = case.but(w13=case.w13[order], w2=case.w2[order], options=case.options | vectors, ids=ids)
    assert torch.equal(other.run(other.pack(kernel)), case.run(case.pack(kernel)))


@SETTINGS
@given(layers())
def test_unpacked_experts_pack_to_the_same_layer(drawn):
    kernel, case, _ = drawn
    packed = case.pack(kernel)
    again = PackedExperts(packing.repack(packed.layer, kernel))
    for name, array in packed.layer.arrays.items():
        if not name.startswith("scale"):  # padding columns of quantized scales may differ, nothing reads them
            assert torch.equal(again.layer.arrays[name], array)
    assert torch.equal(case.run(again), case.run(packed))
