"""A kind of call that has passed the checks is not checked again: whatever the checks cared about must still be noticed."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tvm_moe
from tests.helpers import make_case
from tvm_moe import MoEError, api, runtime
from tvm_moe.plan import Field


@pytest.fixture
def known(kernel):
    """(case, packed, its result) after two calls of one kind: the second did not go through the checks."""
    case = make_case(T=5, E=4, H=66, I=70, dtype=kernel.dtype)
    packed = case.pack(kernel)
    want = case.run(packed)
    return case, packed, want


def served(case, packed, **changes):
    changed = case.but(**changes)
    return api.known_call(changed.x, packed, changed.weights, changed.ids, changed.on_input)


def test_a_second_call_is_known_and_equal(known):
    case, packed, want = known
    got = served(case, packed)
    assert torch.equal(got, want)
    assert torch.equal(case.run(packed), want)
    assert got.data_ptr() != want.data_ptr()


def test_other_kinds_are_not_known(known, set_num_threads):
    case, packed, _ = known
    wide = torch.zeros(5, 200, dtype=case.x.dtype)
    others = (
        {"x": case.x.half()}, {"x": case.x.t().contiguous().t()}, {"x": wide[:, :66]}, {"x": case.x[:4]},
        {"x": case.x.to("meta")}, {"weights": case.weights.double()}, {"weights": case.weights.t().contiguous().t()},
        {"weights": case.weights[:, :1]}, {"ids": case.ids.long()}, {"ids": case.ids.to("meta")},
        {"x": torch.nn.Parameter(case.x)}, {"x": case.x.numpy},
        {"x": case.x.float().to_sparse()}, {"on_input": True},
    )  # fmt: skip
    for changes in others:
        assert served(case, packed, **changes) is None, changes
    assert api.known_call(case.x, "packed", case.weights, case.ids, False) is None
    set_num_threads(3)
    assert served(case, packed) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_router_weights_of_another_dtype_are_known_and_widened(known, dtype):
    """transformers' routers round them to the model's dtype."""
    case, packed, _ = known
    rounded = case.weights.to(dtype)
    want = case.but(weights=rounded.float()).run(packed)
    assert served(case, packed, weights=rounded) is None
    assert torch.equal(case.but(weights=rounded).run(packed), want)
    assert torch.equal(served(case, packed, weights=rounded), want)
    strided = rounded.t().contiguous().t()
    for _ in range(2):
        assert torch.equal(case.but(weights=strided).run(packed), want)


def test_lazy_minus_signs_are_noticed(known):
    case, packed, _ = known
    negated = torch.complex(torch.zeros(5, 2), case.weights).conj().imag  # -weights, a flag on the same memory
    assert negated.is_neg()
    plain = negated.clone(memory_format=torch.contiguous_format).resolve_neg()
    assert torch.equal(case.but(weights=negated).run(packed), case.but(weights=plain).run(packed))


def test_bad_calls_still_say_what_is_wrong(known):
    case, packed, _ = known
    with pytest.raises(MoEError, match="on the CPU"):
        case.but(x=case.x.to("meta")).run(packed)
    with pytest.raises(MoEError, match="must be PackedExperts"):
        tvm_moe.fused_moe(case.x, None, case.weights, case.ids)
    with FakeTensorMode(allow_non_fake_inputs=True):  # what follows operators gets a result that stands for one
        assert isinstance(case.run(packed), FakeTensor)


def test_results_do_not_share_memory_and_inputs_stay(known):
    case, packed, want = known
    before = case.x.clone()
    first, second = case.run(packed), case.run(packed)
    first.zero_()
    assert torch.equal(second, want)
    assert torch.equal(case.x, before)


def test_few_kinds_are_remembered(known, monkeypatch):
    """A server that sees ever new token counts does not grow without bound."""
    _, packed, _ = known
    monkeypatch.setattr("tvm_moe.runtime.PLANS", 3)
    for T in range(1, 9):
        make_case(T=T, E=4, H=66, I=70, dtype=packed.dtype).run(packed)
    assert len(packed.layer.known) <= 3


def test_a_plan_is_remembered_under_its_own_thread_count(known, monkeypatch):
    """Another thread may change the number in the middle of a call."""
    case, packed, _ = known
    counts = iter([1, 2, 5, 7, 9, 11])
    monkeypatch.setattr(api, "get_num_threads", lambda: next(counts))
    packed.layer.known.clear()
    case.run(packed)
    for key, plan in packed.layer.known.items():
        assert plan[Field.THREADS] == key[-1]


def test_a_signal_handler_may_replace_the_scratch_memory(known, monkeypatch):
    """While it is made larger: the handler's own call takes more, and the outer call must not publish what is gone."""
    scratch, real = runtime.Scratch(), np.empty

    def interrupted(*arguments):
        monkeypatch.setattr(runtime.np, "empty", real)
        scratch.take(5000)
        return real(*arguments)

    monkeypatch.setattr(runtime.np, "empty", interrupted)
    for array, start in (scratch.take(1000), scratch.take(900)):
        assert array.ctypes.data <= start <= array.ctypes.data + 64
        assert array.nbytes >= 964


def test_tracing_and_transforms_are_refused(known):
    case, packed, _ = known
    with pytest.raises(MoEError, match="cannot be traced"):
        torch.jit.trace(lambda x: case.but(x=x).run(packed), (case.x,), check_trace=False)
    with pytest.raises(MoEError, match="must be True or False, got \\[\\]"):
        tvm_moe.fused_moe(case.x, packed, case.weights, case.ids, [])


def test_kinds_of_strides_do_not_pile_up(known, monkeypatch):
    case, packed, _ = known
    monkeypatch.setattr(api, "KNOWN_CALLS", 5)
    for stride in range(20):
        weights = torch.rand(200).as_strided((1, 2), (stride, 1))
        case.but(x=case.x[:1], ids=case.ids[:1], weights=weights).run(packed)
    assert len(packed.layer.known) <= 5
