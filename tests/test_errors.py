"""Every wrong input is a MoEError that says what, got and expected; nothing has been written by then."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tvm_moe
from tests.helpers import make_case
from tvm_moe import MoEError, PackedExperts, UnsupportedISAError
from tvm_moe.experts import ExpertWeights

CASE = make_case()  # T 5, E 4, H 24, I 20, k 2
INT8 = make_case(weights="int8")
PACKED = None


def packed():
    global PACKED
    PACKED = PACKED or CASE.pack()
    return PACKED


def floats(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


CALLS = {
    "experts that are none": ({"experts": CASE.w13}, "experts must be PackedExperts .*got Tensor"),
    "x of another rank": ({"hidden_states": floats(24)}, r"hidden_states must be a dense 2-D .*got shape \(24,\)"),
    "x of rank 3": ({"hidden_states": floats(1, 5, 24)}, r"hidden_states must be a dense 2-D .*got shape \(1, 5, 24\)"),
    "x that is numpy": (
        {"hidden_states": np.zeros((5, 24))},
        "hidden_states must be a dense 2-D torch tensor.*got ndarray",
    ),
    "x elsewhere": ({"hidden_states": floats(5, 24, device="meta")}, "hidden_states must be .*on the CPU, got .*meta"),
    "x in f64": ({"hidden_states": floats(5, 24, dtype=torch.float64)}, "hidden_states is torch.float64; expected"),
    "x in int8": ({"hidden_states": floats(5, 24, dtype=torch.int8)}, "hidden_states is torch.int8; expected bfloat16"),
    "x of another width": ({"hidden_states": floats(5, 25)}, "hidden_states has 25 columns.*hidden size 24"),
    "x of other tokens": ({"hidden_states": floats(6, 24)}, r"topk_weights \(5, 2\) and topk_ids \(5, 2\).*T = 6"),
    "weights of rank 1": ({"topk_weights": torch.ones(5)}, r"topk_weights must be a dense 2-D .*got shape \(5,\)"),
    "weights that are numpy": ({"topk_weights": np.ones((5, 2))}, "topk_weights must be .*got ndarray"),
    "weights elsewhere": ({"topk_weights": floats(5, 2, device="meta")}, "topk_weights must be .*on meta"),
    "integer weights": ({"topk_weights": torch.ones(5, 2).int()}, "topk_weights is torch.int32; expected a floating"),
    "complex weights": ({"topk_weights": torch.ones(5, 2).to(torch.complex64)}, "topk_weights is torch.complex64"),
    "weights of another k": ({"topk_weights": torch.ones(5, 3)}, r"topk_weights \(5, 3\) and topk_ids \(5, 2\) must"),
    "ids of rank 1": ({"topk_ids": CASE.ids[:, 0]}, r"topk_ids must be a dense 2-D .*got shape \(5,\)"),
    "ids that are a list": ({"topk_ids": [[0, 1]] * 5}, "topk_ids must be .*got list"),
    "ids elsewhere": ({"topk_ids": CASE.ids.to("meta")}, "topk_ids must be .*on meta"),
    "floating ids": ({"topk_ids": CASE.ids.float()}, "topk_ids is torch.float32; expected int32 or int64"),
    "int16 ids": ({"topk_ids": CASE.ids.short()}, "topk_ids is torch.int16; expected int32 or int64"),
    "uint8 ids": ({"topk_ids": CASE.ids.byte()}, "topk_ids is torch.uint8; expected"),
    "boolean ids": ({"topk_ids": CASE.ids.bool()}, "topk_ids is torch.bool; expected"),
    "ids of other tokens": ({"topk_ids": CASE.ids[:4]}, r"topk_ids \(4, 2\) must both be \[T, k\] with T = 5"),
    "two weights on the input": ({"apply_router_weight_on_input": True}, "needs k = 1, got k = 2"),
    "too many slots": (
        {
            "hidden_states": floats(1, 24).expand(2**16, 24),
            "topk_weights": torch.ones(1, 1).expand(2**16, 2**15),
            "topk_ids": torch.zeros(1, 1, dtype=torch.int32).expand(2**16, 2**15),
        },
        r"T \* k = 2147483648 slots; at most 2\^31 - 1",
    ),
}


def call(out, changes):
    arguments = {"hidden_states": CASE.x, "experts": packed(), "topk_weights": CASE.weights, "topk_ids": CASE.ids}
    return tvm_moe.fused_moe(**(arguments | {"out": out} | changes))


@pytest.mark.parametrize("case", CALLS)
def test_calls(case):
    changes, message = CALLS[case]
    out = torch.full((5, 24), 7, dtype=torch.bfloat16)
    with pytest.raises(MoEError, match=message):
        call(out, changes)
    assert out.eq(7).all()


OUTS = {
    "another shape": (floats(4, 24), r"out is \(4, 24\) torch.bfloat16, expected \(5, 24\) torch.bfloat16"),
    "another rank": (floats(5, 24, 1), r"out is \(5, 24, 1\)"),
    "another dtype": (floats(5, 24, dtype=torch.float32), "out is .*float32, expected .*bfloat16"),
    "elsewhere": (floats(5, 24, device="meta"), "out is .*expected .*on the CPU"),
    "numpy": (np.zeros((5, 24)), "out is ndarray, expected"),
    "with a gradient": (floats(5, 24).requires_grad_(), "out requires grad.*detached"),
    "the input": (CASE.x, "out overlaps hidden_states"),
    "one value for all": (floats(1, 1).expand(5, 24), "out overlaps itself"),
    "one row for all": (floats(1, 24).expand(5, 24), "out overlaps itself"),
}


@pytest.mark.parametrize("case", OUTS)
def test_outs(case):
    out, message = OUTS[case]
    with pytest.raises(MoEError, match=message):
        call(out, {})
    if isinstance(out, torch.Tensor) and out.device.type == "cpu" and out is not CASE.x:
        assert out.eq(0).all()


@pytest.mark.parametrize("name", ["hidden_states", "topk_weights", "topk_ids"])
def test_an_out_that_overlaps_an_input_in_one_byte(name):
    """The output lies in one storage with the input: the last byte of one is the first of the other's."""
    x, H = CASE.x, 24
    tensor = {"hidden_states": x, "topk_weights": CASE.weights, "topk_ids": CASE.ids}[name]
    size = tensor.numel() * tensor.element_size()
    raw = torch.zeros(size + 5 * H * 2, dtype=torch.uint8)
    inside = raw[:size].view(tensor.dtype).view(tensor.shape)
    inside.copy_(tensor)
    beside, over = (raw[at : at + 5 * H * 2].view(torch.bfloat16).view(5, H) for at in (size, size - 2))
    assert torch.equal(call(beside, {name: inside}), call(None, {}))
    with pytest.raises(MoEError, match=f"out overlaps {name} in memory"):
        call(over, {name: inside})


W13, W2, S13, S2 = CASE.w13, CASE.w2, torch.ones(4, 40), torch.ones(4, 24)
Q13, Q2 = INT8.w13, INT8.w2
SCALES = {"w13_scale": S13, "w2_scale": S2}


def spoiled(vector, value):
    vector = vector.clone()
    vector[2, 3] = value
    return vector


PACKS = {
    "w13 of rank 2": ({"w13": W13[0]}, r"w13 must be a dense 3-D torch tensor.*got shape \(40, 24\)"),
    "w2 that is numpy": ({"w2": np.zeros((4, 24, 20))}, "w2 must be a dense 3-D torch tensor.*got ndarray"),
    "other experts": ({"w2": W2[:3]}, r"w13 \(4, 40, 24\) and w2 \(3, 24, 20\) disagree"),
    "w2 transposed": ({"w2": W2.transpose(1, 2)}, r"w2 \(4, 20, 24\) disagree.*pass .transpose\(1, 2\)"),
    "half of w13": ({"w13": W13[:, :20]}, r"expert 0, w13 has shape \(20, 24\), expected \(40, 24\)"),
    "a gate for relu2": ({"activation": "relu2"}, r"expert 0, w13 has shape \(40, 24\), expected \(20, 24\)"),
    "no experts": ({"w13": W13[:0], "w2": W2[:0]}, "num_experts must be at least 1, got 0"),
    "no columns": ({"w13": W13[..., :0], "w2": W2[:, :0]}, "hidden_size must be at least 1, got 0"),
    "no intermediate": ({"w13": W13[:, :0], "w2": W2[..., :0]}, "intermediate_size must be at least 1, got 0"),
    "w13 elsewhere": ({"w13": W13.to("meta")}, r"expert 0, w13 is on meta.*call .cpu\(\)"),
    "w13 in f64": ({"w13": W13.double()}, "expert 0, w13 is torch.float64; dtype='bf16' takes bfloat16, float16"),
    "w2 in int32": ({"w2": W2.int()}, "expert 0, w2 is torch.int32"),
    "one in int8": ({"w2": Q2}, "w13 is torch.bfloat16 and w2 is torch.int8; both or none"),
    "int8 without scales": ({"w13": Q13, "w2": Q2}, "expert 0: w13_scale is missing; int8 weights need scales"),
    "int8 with one scale": ({"w13": Q13, "w2": Q2, "w13_scale": S13}, "expert 0: w2_scale is missing"),
    "int8 as bf16": ({"w13": Q13, "w2": Q2, **SCALES, "dtype": "bf16"}, "w13 is torch.int8; dtype='bf16' takes"),
    "scales of floats": (SCALES, "expert 0: w13_scale is unexpected; .*float weights take none"),
    "an unknown dtype": ({"dtype": "fp8"}, r"dtype='fp8' is not supported; expected one of \['bf16', 'int8'\]"),
    "a bias of another shape": ({"w13_bias": torch.ones(4, 39)}, r"w13_bias has shape \(4, 39\), expected \(4, 40\)"),
    "a bias of rank 1": ({"w2_bias": torch.ones(24)}, r"w2_bias has shape \(24,\), expected \(4, 24\) or \(4, 24, 1\)"),
    "a bias that is a list": ({"w2_bias": [0.0]}, "w2_bias has shape list"),
    "an integer bias": ({"w2_bias": torch.ones(4, 24).int()}, "w2_bias must be a floating tensor.*got torch.int32"),
    "a bias elsewhere": ({"w2_bias": torch.ones(4, 24, device="meta")}, "w2_bias must be .*on meta"),
    "a scale per expert": (
        {"w13": Q13, "w2": Q2, **SCALES, "w2_scale": torch.ones(4, 1)},
        r"w2_scale has shape \(4, 1\)",
    ),
    "NaN scales": ({"w13": Q13, "w2": Q2, **SCALES, "w2_scale": spoiled(S2, torch.nan)}, "w2_scale holds NaN or Inf"),
    "Inf scales": (
        {"w13": Q13, "w2": Q2, **SCALES, "w13_scale": spoiled(S13, torch.inf)},
        "w13_scale holds NaN or Inf",
    ),
    "an unknown activation": ({"activation": "mish"}, r"unknown activation 'mish'; expected one of \["),
    "an alpha of silu": ({"alpha": 1.0}, "activation 'silu' takes no alpha, got alpha=1.0"),
    "a limit of gelu": ({"activation": "gelu", "limit": 1.0}, "activation 'gelu' takes no limit"),
    "a limit of 0": ({"limit": 0.0}, "limit must be a positive finite number, got 0.0"),
    "a limit of NaN": ({"limit": float("nan")}, "limit must be a positive finite number, got nan"),
    "an alpha of inf": ({"activation": "swigluoai", "alpha": float("inf")}, "alpha must be a finite number, got inf"),
    "no limit": ({"activation": "swiglustep"}, "activation 'swiglustep' needs a limit"),
    "interleaved without a gate": (
        {"w13": W13[:, :20], "activation": "relu2", "interleaved": True},
        "interleaved=True needs a gated activation, 'relu2' has no gate",
    ),
}


@pytest.mark.parametrize("case", PACKS)
def test_packing(case):
    changes, message = PACKS[case]
    with pytest.raises(MoEError, match=message):
        tvm_moe.pack_experts(**({"w13": W13, "w2": W2} | changes))


@pytest.mark.parametrize(("isa", "message"), [("pentium", "is no level of"), ("avx9", "is no level of")])
def test_levels(isa, message):
    with pytest.raises(UnsupportedISAError, match=f"isa='{isa}' {message}"):
        tvm_moe.pack_experts(W13, W2, isa=isa)


@pytest.mark.parametrize("sizes", [(-1, 24, 20), (4, 0, 20), (4, 24, -20)])
def test_sizes_below_1(sizes):
    with pytest.raises(MoEError, match="must be at least 1, got"):
        PackedExperts.from_experts([], *sizes, dtype="bf16")


def experts(*changes):
    return [ExpertWeights(**({"w13": W13[e], "w2": W2[e]} | change)) for e, change in enumerate(changes)]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (experts({}, {}), "got 2 experts, expected 4"),
        (experts(*[{}] * 4) + experts({}), "experts must come in order: got expert 4"),
        (experts({}, {"w2": W2[1, :23]}), r"expert 1, w2 has shape \(23, 20\), expected \(24, 20\)"),
        (experts({}, {"w2_bias": torch.ones(24)}), "expert 1: w2_bias is unexpected"),
        (experts({"w2_bias": torch.ones(24)}, {}), "expert 1: w2_bias is missing"),
        (experts({"w13_bias": torch.ones(24)}), r"expert 0: w13_bias has shape \(24,\).*expected \[40\]"),
        (experts({}, {"w13": Q13[1]}), "expert 1, w13 is torch.int8"),
    ],
)
def test_streams_of_experts(stream, message):
    with pytest.raises(MoEError, match=message):
        PackedExperts.from_experts(stream, 4, 24, 20, dtype="bf16")


@pytest.mark.parametrize("n", [0, -1, 4097, 1.0, "2", True])
def test_thread_counts(n):
    before = tvm_moe.get_num_threads()
    with pytest.raises(MoEError, match=r"number of threads must be an integer from 1 to 4096 or None, got"):
        tvm_moe.set_num_threads(n)
    assert tvm_moe.get_num_threads() == before


def test_sparse_tensors_are_refused():
    case = make_case(dtype="bf16")
    packed = case.pack()
    with pytest.raises(MoEError, match=r"hidden_states must be a dense 2-D torch tensor.*sparse"):
        tvm_moe.fused_moe(case.x.to_sparse(), packed, case.weights, case.ids)
    with pytest.raises(MoEError, match=r"w13 must be a dense 3-D torch tensor.*sparse"):
        tvm_moe.pack_experts(case.w13.to_sparse(), case.w2)


def test_tensors_without_memory_are_refused():
    case = make_case(x_dtype=torch.float32, dtype="bf16")
    packed = case.pack()
    empty = case.x.clone()
    empty.untyped_storage().resize_(0)
    for x in (torch._efficientzerotensor(tuple(case.x.shape)), empty):
        with pytest.raises(MoEError, match="has no memory of its own"):
            tvm_moe.fused_moe(x, packed, case.weights, case.ids)
