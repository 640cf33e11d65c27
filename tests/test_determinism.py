"""A token's result does not depend on its batch, on the number of threads, on other callers, or on a fork."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings

import numpy as np
import pytest
import torch

import tvm_moe
from tests.helpers import ACTIVATION_OPTIONS, make_case
from tvm_moe import SlowPathWarning

F32 = torch.float32


def assert_bit_equal(got, want):
    """Equal, NaN and the sign of zero included; the first difference is printed."""
    kind = {2: torch.int16, 4: torch.int32}[want.element_size()]
    differs = (got.contiguous().view(kind) != want.contiguous().view(kind)).nonzero()
    assert not len(differs), f"{len(differs)} differ, first at {differs[0].tolist()}: {got[0]}, expected {want[0]}"


@pytest.mark.parametrize("options", ACTIVATION_OPTIONS, ids=str)
def test_a_token_alone_and_in_a_batch(kernel, options):
    """Every row count of a tile, its remainders, blocks of one expert: each token keeps every bit."""
    case = make_case(T=64, E=6, H=135, I=67, k=3, bias=True, x_dtype=F32, dtype=kernel.dtype, **options)
    packed = case.pack(kernel)
    want = case.run(packed)
    for first in (0, 1, 5, 63):
        for count in (1, 2, kernel.MR + 1, 29):
            part = slice(first, first + count)
            some = case.but(x=case.x[part], weights=case.weights[part], ids=case.ids[part])
            assert_bit_equal(some.run(packed), want[part])


def test_a_token_beside_a_hot_expert(kernel):
    """Its experts' blocks are cut differently when hundreds of other rows come first."""
    case = make_case(T=700, E=4, H=66, I=70, k=2, x_dtype=F32, dtype=kernel.dtype)
    case.ids[:640] = torch.tensor([1, 1])
    packed = case.pack(kernel)
    want = case.run(packed)
    for t in (0, 639, 640, 699):
        one = case.but(x=case.x[[t]], weights=case.weights[[t]], ids=case.ids[[t]])
        assert_bit_equal(one.run(packed), want[[t]])


@pytest.mark.parametrize("K", [4099, 9001])
def test_a_k_of_several_chunks(kernel, K):
    """Larger than what a pass over the rows takes, with one row and with many."""
    case = make_case(T=40, E=2, H=K, I=33, k=1, x_dtype=F32, dtype=kernel.dtype)
    packed = case.pack(kernel)
    want = case.run(packed)
    for part in (slice(0, 1), slice(3, 3 + kernel.MR)):
        some = case.but(x=case.x[part], weights=case.weights[part], ids=case.ids[part])
        assert_bit_equal(some.run(packed), want[part])


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, F32])
def test_the_thread_count_changes_nothing(kernel, x_dtype, set_num_threads):
    case = make_case(T=64, E=6, H=200, I=300, k=3, bias=True, x_dtype=x_dtype, dtype=kernel.dtype)
    set_num_threads(1)
    one = case.pack(kernel)
    want = case.run(one)
    for threads in (2, 3, 7):
        set_num_threads(threads)
        assert tvm_moe.get_num_threads() == threads
        other = case.pack(kernel)
        assert all(torch.equal(other.layer.arrays[name], array) for name, array in one.layer.arrays.items())
        for _ in range(5):
            assert_bit_equal(case.run(one), want)


def test_torchs_thread_count_is_followed(kernel):
    before = torch.get_num_threads()
    case = make_case(T=64, E=6, H=200, I=100, dtype=kernel.dtype)
    packed = case.pack(kernel)
    want = case.run(packed)
    try:
        torch.set_num_threads(1)
        assert tvm_moe.get_num_threads() == 1
        assert_bit_equal(case.run(packed), want)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_two_callers_at_once(kernel):
    """Threads with inputs and scratch memory of their own, and a layer that both use."""
    shared = make_case(T=37, E=4, H=66, I=70, x_dtype=F32, dtype=kernel.dtype)
    packed = shared.pack(kernel)
    inputs = [shared.but(x=shared.x * (i + 1), ids=(shared.ids + i) % 4) for i in range(3)]
    inputs[2] = inputs[2].but(x=inputs[2].x[:5], weights=inputs[2].weights[:5], ids=inputs[2].ids[:5])
    want = [case.run(packed) for case in inputs]
    start, wrong = threading.Barrier(3), []

    def caller(i):
        start.wait()
        for _ in range(200):
            if not torch.equal(inputs[i].run(packed), want[i]):
                wrong.append(i)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(3)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert wrong == []


def in_child(work):
    """Run ``work`` in a forked child; what went wrong, if anything. The child never returns into the tests."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forking beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for threads it does not have waits forever: end it
        report = b""
        try:
            work()
        except BaseException:
            report = traceback.format_exc().encode()
        os.write(writer, report)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        report = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return report if status == 0 else f"the child ended with {status}"


def test_a_forked_child_computes_serially_and_says_so_once(kernel, set_num_threads):
    set_num_threads(2)
    case = make_case(T=33, E=4, H=66, I=70, dtype=kernel.dtype)
    packed = case.pack(kernel)
    want = case.run(packed)

    def work():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                assert torch.equal(case.run(packed), want)
            assert torch.equal(case.run(case.pack(kernel)), want)
        assert tvm_moe.get_num_threads() == 1
        assert [w.category for w in said] == [SlowPathWarning]
        assert "forked child" in str(said[0].message)

    report = in_child(work)
    assert report == "", report
    assert torch.equal(case.run(packed), want)
    assert tvm_moe.get_num_threads() == 2


def test_a_forked_child_may_need_torch_operations(kernel):
    """Each of these enters an OpenMP region of torch in this process; in a child that would wait for threads forever."""
    torch.ones(1 << 20).add_(1)  # the team exists
    case = make_case(T=300, E=4, H=512, I=70, k=2, dtype=kernel.dtype)
    case = case.but(x=case.x.half())
    if kernel.dtype == "bf16":
        case = case.but(w13=case.w13.half(), w2=case.w2.half())
    want = case.run(case.pack(kernel)).numpy()
    precise = case.but(weights=case.weights.double())
    logits, before = torch.randn(20000, 4), torch.get_num_threads()

    def work():
        warnings.simplefilter("ignore")
        packed = case.pack(kernel)
        turned = torch.empty(case.x.shape[::-1], dtype=torch.float16).t()
        for got in (case.run(packed), case.run(packed, turned), precise.run(packed)):
            assert np.array_equal(got.numpy(), want)  # numpy: torch.equal would hang in here
        none = torch.empty(len(case.x), 0)
        assert not tvm_moe.fused_moe(case.x, packed, none, none.int()).numpy().any()
        assert tvm_moe.route(logits, 2)[1].shape == (20000, 2)
        assert torch.get_num_threads() == before

    report = in_child(work)
    assert report == "", report


def test_the_child_helper_reports_failures():
    assert "ZeroDivisionError" in in_child(lambda: 1 / 0)
    assert in_child(lambda: os.kill(os.getpid(), signal.SIGALRM)) == "the child ended with -14"
