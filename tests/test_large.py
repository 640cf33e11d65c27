"""Offsets past 2^31 elements, in weights and in tokens: what 32-bit index arithmetic anywhere would get wrong."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.helpers import Case, assert_matches_reference
from tvm_moe import PackedExperts
from tvm_moe.experts import ExpertWeights


def available_gib():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


@pytest.fixture(autouse=True)
def memory():
    if available_gib() < 12:
        pytest.skip(f"needs 12 GiB of memory, {available_gib():.1f} are available")


def in_thread(work):
    """Run ``work`` in a thread of its own, whose scratch memory goes with it; its exception comes out here."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class Layer:
    """Experts of different int8 weights that need no memory of their own: expert e starts e rows into one matrix."""

    def __init__(self, E, H, I):
        rng = torch.Generator().manual_seed(0)
        self.E, self.H, self.I = E, H, I
        self.w13 = torch.randint(-128, 128, (2 * I + E, H), generator=rng, dtype=torch.int8)
        self.w2 = torch.randint(-128, 128, (H + E, I), generator=rng, dtype=torch.int8)
        self.s13, self.s2 = torch.full((2 * I,), 1 / (74 * H**0.5)), torch.full((H,), 1 / (74 * I**0.5))

    def expert(self, e):
        return ExpertWeights(self.w13[e : e + 2 * self.I], self.w2[e : e + self.H], self.s13, self.s2)

    def pack(self, kernel):
        experts = map(self.expert, range(self.E))
        return PackedExperts.from_experts(experts, self.E, self.H, self.I, dtype="int8", isa=kernel.isa)

    def case(self, x, weights, ids, of):
        """A case with the experts ``of`` alone, and these ids in it."""
        chosen = [self.expert(e) for e in of]
        options = {f"{n}_scale": torch.stack([getattr(e, f"{n}_scale") for e in chosen]) for n in ("w13", "w2")}
        w13, w2 = (torch.stack([getattr(e, name) for e in chosen]) for name in ("w13", "w2"))
        mapped = torch.tensor([[of.index(e) for e in row] for row in ids.tolist()], dtype=torch.int32)
        return Case(x, w13, w2, weights, mapped, options)


def test_weights_beyond_2_to_31_elements(int8_kernel):
    """Expert 256 starts at element 2^31 of w13; those around it and the first ones are right."""
    layer = Layer(E=258, H=2048, I=2048)
    packed = layer.pack(int8_kernel)
    assert packed.layer.arrays["w13"].numel() > 2**31
    of = [0, 1, 255, 256, 257]
    ids = torch.tensor([[0, 257], [256, 1], [255, 256], [257, 0], [1, 255]], dtype=torch.int32)
    rng = torch.Generator().manual_seed(1)
    x, weights = torch.randn(5, 2048, generator=rng), torch.rand(5, 2, generator=rng)
    case = layer.case(x, weights, ids, of)
    assert_matches_reference(case.but(ids=ids).run(packed), case)


def test_tokens_beyond_2_to_31_elements(int8_kernel):
    """Token 2^20 starts at element 2^31 of the prepared rows and of the result; most tokens are skipped."""
    T, H = 2**20 + 8, 2048
    layer = Layer(E=2, H=H, I=32)
    packed = layer.pack(int8_kernel)
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(T + H, generator=rng).bfloat16().as_strided((T, H), (1, 1))  # overlapping rows need no memory
    weights, ids = torch.rand(T, 1, generator=rng), torch.full((T, 1), -1)
    some = [0, 1, 2**20 - 1, 2**20, 2**20 + 1, T - 1]
    ids[some] = torch.tensor([[0], [1], [0], [1], [0], [1]])
    case = layer.case(x[some], weights[some], ids[some], [0, 1])

    def call():
        got = case.but(x=x, weights=weights, ids=ids).run(packed)
        assert_matches_reference(got[some], case)
        got[some] = 0
        assert not any(part.any() for part in got.split(2**16))

    in_thread(call)
