"""The packed layout against an independent packing, its padding, start values, quantization, and what packing costs."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tvm_moe
from tests.conftest import rows
from tests.helpers import make_case
from tests.test_layer import LAYOUTS, STORED, strided
from tvm_moe import MoEError, PackedExperts, kernels, packing, reference
from tvm_moe.expert_weights import INT8_MAX_K
from tvm_moe.experts import ExpertWeights

ODD = [(1, 1), (7, 5), (33, 31), (66, 35), (130, 97), (515, 97), (35, 300)]  # (H, I)
KINDS = [
    pytest.param(row.values[0], kind, id=f"{row.id}-{kind}", marks=row.marks)
    for row in rows(*kernels.DTYPES)
    for kind in STORED[row.values[0].dtype]
]


def pack_by_hand(w, kernel, parts, interleaved=False):
    """``w [E, parts * n, K]`` element by element as the table's docstring says: [E, panels, K / group, NR, group]."""
    (E, N, K), NR, group = w.shape, kernel.NR, kernel.group
    n, half = N // parts, NR // parts
    out = np.zeros((E, -(-n // half), kernel.k_groups(K), NR, group), w.dtype)
    for i in range(n):
        for part in range(parts):
            row = i * parts + part if interleaved else part * n + i
            for k in range(K):
                out[:, i // half, k // group, part * half + i % half, k % group] = w[:, row, k]
    return out


def stored(tensor):
    """As numpy, bf16 as its bits."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def expected(w, kernel):
    """What a logical matrix becomes before it is laid out, and its scales."""
    if kernel.dtype == "bf16":
        return stored(w.bfloat16()), None
    if w.dtype == torch.int8:
        return w.numpy(), None
    q, scale = reference.quantize_weight(w)
    return q.numpy(), scale


@pytest.mark.parametrize(("H", "I"), ODD)
@pytest.mark.parametrize(("kernel", "kind"), KINDS)
@pytest.mark.parametrize("options", [{"activation": "relu2"}, {}, {"interleaved": True}], ids=str)
def test_weights_lie_as_the_table_says(kernel, H, I, kind, options):
    case = make_case(E=2, H=H, I=I, weights=kind, **options)
    layout = LAYOUTS[(H + I) % len(LAYOUTS)]
    moved = case.but(w13=strided(case.w13, layout), w2=strided(case.w2, layout))
    arrays = moved.pack(kernel).layer.arrays
    parts = 1 if options.get("activation") == "relu2" else 2
    for which, w, cut in (("13", case.w13, parts), ("2", case.w2, 1)):
        logical, _ = expected(w, kernel)
        want = pack_by_hand(logical, kernel, cut, options.get("interleaved", False) and which == "13")
        assert np.array_equal(stored(arrays[f"w{which}"]), want)
        if kernel.offset:
            sums = want.astype(np.int64).sum((2, 4))
            assert np.array_equal(arrays[f"start{which}"].numpy(), -kernel.offset * sums)
        else:
            assert not arrays[f"start{which}"].any()


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_vectors_lie_as_their_columns(kernel, activation):
    """Scales and biases are packed as a matrix of K = 1 would be; their padding is zero."""
    weights = "int8" if kernel.dtype == "int8" else "bf16"
    case = make_case(E=3, H=67, I=35, bias=True, weights=weights, activation=activation)
    arrays, parts = case.pack(kernel).layer.arrays, 2 if activation == "silu" else 1
    for name, vector in case.options.items():
        if isinstance(vector, torch.Tensor):
            which, kind = name[1:].split("_")
            by_hand = pack_by_hand(vector[..., None].numpy(), kernel, parts if which == "13" else 1)
            assert np.array_equal(arrays[f"{kind}{which}"].numpy(), by_hand[:, :, 0, :, 0])


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_quantization_is_that_of_the_reference_bit_for_bit(int8_kernel, kind):
    """Halfway values, zero rows, one value a row, denormals and the largest numbers among them."""
    case = make_case(E=2, H=67, I=35, weights=kind)
    w = case.w13
    w[0, 0] = 0
    w[0, 1, 1:] = 0
    w[0, 2] = torch.linspace(-127, 127, 67).mul(2).round().div(2)
    w[0, 3] *= torch.finfo(w.dtype).tiny
    w[0, 4] *= torch.finfo(w.dtype).max / 8
    if kind == "f32":  # so few bits that the scale is 0 or has one or two
        w[0, 5:9] = torch.tensor([5e-44, 8e-44, 2.35e-43, 2.25e-41])[:, None] * torch.linspace(-1, 1, 67)
    packed = case.pack(int8_kernel)
    for e in range(2):
        got = packing.unpack(packed.layer, e)
        for name, w in (("w13", case.w13), ("w2", case.w2)):
            q, scale = reference.quantize_weight(w[e])
            assert torch.equal(getattr(got, name), q)
            assert torch.equal(getattr(got, f"{name}_scale"), scale)


def test_conversion_to_bf16_is_that_of_torch(bf16_kernel):
    bits = torch.arange(0, 2**32, 104_729, dtype=torch.int64).to(torch.uint32).view(torch.float32)
    w13 = bits[: 2 * 64 * 300].reshape(1, 128, 300)
    case = make_case(E=1, H=300, I=64).but(w13=w13, w2=torch.zeros(1, 300, 64))
    got, want = packing.unpack(case.pack(bf16_kernel).layer, 0).w13, w13[0].bfloat16()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~want.isnan()], want[~want.isnan()])


@pytest.mark.parametrize("options", [{"activation": "relu2"}, {}, {"interleaved": True}], ids=str)
@pytest.mark.parametrize(("H", "I"), ODD)
def test_unpacking_gives_back_what_was_packed(kernel, options, H, I):
    case = make_case(E=2, H=H, I=I, bias=True, weights="int8" if kernel.dtype == "int8" else "bf16", **options)
    packed = case.pack(kernel)
    order = torch.arange(len(case.w13[0]))
    if options.get("interleaved"):
        order = torch.cat([order[0::2], order[1::2]])
    for e in range(2):
        got = packing.unpack(packed.layer, e)
        assert torch.equal(got.w13, case.w13[e, order])
        assert torch.equal(got.w2, case.w2[e])
        for name in ("w13_bias", "w2_bias", "w13_scale", "w2_scale"):
            want = case.options.get(name)
            got_vector = getattr(got, name)
            assert (got_vector is None) == (want is None)
            assert want is None or torch.equal(got_vector, want[e, order] if "13" in name else want[e])


def test_properties(kernel):
    packed = make_case(E=3, H=66, I=35, activation="gelu", bias=True, dtype=kernel.dtype).pack(kernel)
    assert (packed.num_experts, packed.hidden_size, packed.intermediate_size) == (3, 66, 35)
    assert (packed.dtype, packed.activation, packed.isa) == (kernel.dtype, "gelu", kernel.isa)
    assert packed.nbytes == sum(t.numel() * t.element_size() for t in packed.layer.arrays.values())
    assert repr(packed).startswith("PackedExperts(num_experts=3, hidden_size=66, ")


def test_packed_experts_are_immutable():
    packed = make_case().pack()
    for name in ("layer", "dtype", "_tensors", "anything"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(packed, name, None)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(packed, name)


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_floats_that_cannot_be_quantized(int8_kernel, name, bad):
    case = make_case(E=3, dtype="int8")
    getattr(case, name)[1, 5, 7] = bad
    with pytest.raises(MoEError, match=rf"expert 1, {name}: .*not finite"):
        case.pack(int8_kernel)


def test_k_beyond_int32(int8_kernel):
    most = INT8_MAX_K
    for H, I in ((most + 1, 8), (8, most + 1)):
        with pytest.raises(MoEError, match=rf"K = {most + 1} can overflow int32; K may be at most {most}: use bf16"):
            PackedExperts.from_experts([], 1, H, I, dtype="int8", isa=int8_kernel.isa)
        with pytest.raises(MoEError, match="got 0 experts, expected 1"):
            PackedExperts.from_experts([], 1, H, I, dtype="bf16", isa=int8_kernel.isa)


@pytest.mark.parametrize("stored", [("float", "int8"), ("int8", "float"), ("int8", "int8", "float")], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_experts_stored_in_different_ways(int8_kernel, stored, batch):
    """Scales of an expert were dropped, or missed, where the first one had none."""
    made = {kind: make_case(E=1, weights="int8" if kind == "int8" else "f32") for kind in set(stored)}

    def expert(case):
        scales = {n: v[0] for n, v in case.options.items() if n.endswith("scale")}
        return ExpertWeights(case.w13[0], case.w2[0], **scales)

    experts = [expert(made[kind]) for kind in stored]
    with pytest.raises(MoEError, match=rf"expert {len(stored) - 1}: w13_scale is (not )?given, .*quantize all or none"):
        PackedExperts.from_experts(experts, len(stored), 24, 20, dtype="int8", isa=int8_kernel.isa, batch=batch)


def test_from_experts_streams():
    """One expert is asked for at a time, and told about when it is done."""
    case, log = make_case(E=3), []

    def experts():
        for e in range(3):
            log.append(f"read {e}")
            yield ExpertWeights(case.w13[e], case.w2[e])

    packed = PackedExperts.from_experts(experts(), 3, 24, 20, dtype="bf16", progress=lambda e: log.append(f"done {e}"))
    assert log == ["read 0", "done 0", "read 1", "done 1", "read 2", "done 2"]
    assert torch.equal(case.run(packed), case.run(case.pack()))


MEASURE = """
import sys, torch, tvm_moe
kind, dtype, isa = sys.argv[1:]
def field(name):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(name))
def layer(E, H, I):
    w13, w2 = torch.empty(E, H, 2 * I, dtype=getattr(torch, kind)), torch.empty(E, I, H, dtype=getattr(torch, kind))
    for w in (*w13, *w2):
        w.fill_(0.5)
    return w13.transpose(1, 2), w2.transpose(1, 2)
tvm_moe.pack_experts(*layer(1, 64, 64), dtype=dtype, isa=isa)
w13, w2 = layer(24, 1024, 1024)
before = field("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
packed = tvm_moe.pack_experts(w13, w2, dtype=dtype, isa=isa)
print(field("VmHWM") - before, packed.nbytes, (w13[0].nbytes + w2[0].nbytes))
"""


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_packing_does_not_double_memory(kernel, kind):
    """At most the packed layer and two experts above the source; 8 MiB are the allocator's and the threads' stacks."""
    command = [sys.executable, "-c", MEASURE, kind, kernel.dtype, kernel.isa]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    peak, packed, expert = map(int, done.stdout.split())
    assert 0.9 * packed < peak <= packed + 2 * expert + 2**23


class Int8Like:
    """As torchao's Int8Tensor looks: the parts that are read."""

    def __init__(self, qdata, scale, **more):
        self.qdata, self.scale = qdata, scale
        vars(self).update(more)


def test_torchao_weights_are_taken_as_they_are():
    case = make_case(weights="int8")
    scales = {name: case.options[f"{name}_scale"][..., None] for name in ("w13", "w2")}
    got = tvm_moe.pack_experts(Int8Like(case.w13, scales["w13"]), Int8Like(case.w2, scales["w2"]))
    assert torch.equal(case.run(got), case.run(case.pack()))
    linear = tvm_moe.pack_linear(Int8Like(case.w2, scales["w2"]))
    assert linear.dtype == "int8"


def test_torchao_weights_that_are_not_symmetric():
    case = make_case(weights="int8")
    w13 = Int8Like(case.w13, case.options["w13_scale"][..., None], zero_point=torch.ones(1))
    with pytest.raises(MoEError, match=r"w13 is quantized with zero points: .*; dequantize it first"):
        tvm_moe.pack_experts(w13, case.w2)
