"""Packed experts and whole MoE blocks as torch modules."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import tvm_moe
from tests import tiny_models
from tests.helpers import make_case
from tvm_moe import FusedMoE, MoEError, checkpoint
from tvm_moe.dense import Router
from tvm_moe.layers import Experts
from tvm_moe.runtime import ARRAYS


@pytest.fixture
def case():
    return make_case(T=6, E=4, H=40, I=24, dtype="int8")


@pytest.fixture
def block(case):
    return FusedMoE(case.pack(), torch.randn(4, 40), 2, shared=torch.nn.Linear(40, 40, bias=False).bfloat16())


def test_a_block_is_router_experts_and_shared_expert(case, block):
    x = torch.randn(2, 3, 40).bfloat16()
    flat = x.view(6, 40)
    weights, ids = tvm_moe.route(block.router(flat), 2)
    want = tvm_moe.fused_moe(flat, case.pack(), weights, ids) + block.shared(flat)
    assert torch.equal(block(x), want.view(2, 3, 40))


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_a_block_from_a_checkpoint_is_its_layer(name, tmp_path):
    tiny_models.make(name).save_pretrained(tmp_path)
    opened = checkpoint.open(tmp_path)
    index = opened.layers[-1]
    reader = opened.layer(index)
    made = FusedMoE.from_checkpoint(tmp_path, index)
    x = torch.randn(5, reader.hidden_size).bfloat16()
    weights, ids = tvm_moe.route(reader.router(x), **reader.routing)
    want = tvm_moe.fused_moe(x, reader.pack(), weights, ids)
    if reader.has_shared_experts:
        want = want + reader.shared_expert(x)
    assert torch.equal(made(x), want)


def test_int8_from_a_floating_checkpoint(tmp_path):
    tiny_models.make("qwen3_moe").save_pretrained(tmp_path)
    assert FusedMoE.from_checkpoint(tmp_path, 0, dtype="int8", isa="generic").experts.packed.dtype == "int8"


def test_conversions_leave_packed_weights_as_they_are(case, block):
    want = block.experts(case.x, case.weights, case.ids)
    for convert in (torch.nn.Module.half, torch.nn.Module.double, lambda m: m.to(torch.bfloat16), torch.nn.Module.cpu):
        assert torch.equal(convert(block).experts(case.x, case.weights, case.ids), want)
    with pytest.raises(MoEError, match="cannot be moved to meta"):
        block.to("meta")


def test_state_dicts_carry_the_layout(case, block):
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    other = FusedMoE(
        make_case(T=6, E=4, H=40, I=24, dtype="int8", seed=9).pack(), torch.randn(4, 40), 2, shared=block.shared
    )
    assert not torch.equal(other(case.x), block(case.x))
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(case.x), block(case.x))


def test_a_state_dict_of_another_layout_is_refused(case, block):
    for foreign in (
        case.but(options={"dtype": "bf16"}).pack(),
        case.but(options={"dtype": "int8", "isa": "generic"}).pack(),
    ):
        with pytest.raises(MoEError, match=r"experts were packed as .*pack the original weights on this CPU"):
            block.experts.load_state_dict(Experts(foreign).state_dict())


def test_copies(case, block):
    twin = copy.deepcopy(block)
    assert torch.equal(twin(case.x), block(case.x))
    assert twin.experts.w13.data_ptr() != block.experts.w13.data_ptr()


def test_replaced_buffers_serve_from_then_on(case):
    """And the memory of the former ones is not read again, whatever lies there now."""
    ours, theirs = Experts(case.pack()), Experts(case.but(w2=-case.w2).pack())
    call = case.x, case.weights, case.ids
    first, second = ours(*call), theirs(*call)
    assert not torch.equal(first, second)
    for expected, module in ((second, theirs), (first, Experts(case.pack()))):
        for name in ARRAYS:
            setattr(ours, name, getattr(module, name).clone())
        for _ in range(2):
            assert torch.equal(ours(*call), expected)
    assert torch.equal(torch.func.functional_call(ours, dict(theirs.named_buffers()), call), second)
    assert torch.equal(ours(*call), first)
    ours.w13 = ours.w13[:1]
    with pytest.raises(MoEError, match="tensor w13 is"):
        ours(*call)
    del ours.w13
    with pytest.raises(MoEError, match="have lost their buffer 'w13'"):
        ours(*call)


def test_no_parameters_to_train(block):
    assert {name for name, _ in block.named_parameters()} == {"shared.weight"}


def test_wrong_routing_is_an_error_at_once(case):
    with pytest.raises(MoEError, match="top_k must be between 1 and the number of experts 4, got 5"):
        FusedMoE(case.pack(), torch.randn(4, 40), 5)
    with pytest.raises(MoEError, match="unknown scoring 'max'"):
        FusedMoE(case.pack(), torch.randn(4, 40), 2, scoring="max")


def test_routing_options_reach_the_router(case):
    bias, scale = torch.tensor([9.0, 0, 0, 9]), torch.rand(4)
    block = FusedMoE(
        case.pack(), Router(torch.randn(4, 40)), 2, scoring="sigmoid", correction_bias=bias, per_expert_scale=scale
    )
    options = {"scoring": "sigmoid", "correction_bias": bias, "per_expert_scale": scale}
    weights, ids = tvm_moe.route(block.router(case.x), 2, **options)
    assert set(ids.flatten().tolist()) == {0, 3}
    assert torch.equal(block(case.x), tvm_moe.fused_moe(case.x, case.pack(), weights, ids))


def test_it_prints_what_it_is(block):
    assert "PackedExperts(num_experts=4, hidden_size=40" in str(block)


def test_a_router_for_other_experts_is_an_error(case):
    with pytest.raises(MoEError, match=r"router has shape \(3, 40\), expected \[E, H\] = \(4, 40\)"):
        FusedMoE(case.pack(), torch.randn(3, 40), 2)
    with pytest.raises(MoEError, match="the router gives 5 logits a token, this block has 4 experts"):
        FusedMoE(case.pack(), torch.nn.Linear(40, 5, dtype=torch.bfloat16), 2)(case.x)


def test_hidden_states_of_another_size_are_an_error(block):
    with pytest.raises(MoEError, match="hidden_states has 41 columns, this block has hidden size 40"):
        block(torch.randn(2, 41))


def test_explain_takes_modules(block):
    once = torch.nn.Sequential(block, copy.deepcopy(block))
    for holder in (block, block.experts, once):
        assert tvm_moe.explain(holder).count("PackedExperts(num_experts=4") == 1
    with pytest.raises(MoEError, match="a module that holds some, or None; got Linear without any"):
        tvm_moe.explain(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, torch.int8])
def test_torch_names_of_dtypes(case, dtype):
    kind = "int8" if dtype == torch.int8 else "bf16"
    assert case.but(options={"dtype": dtype}).pack().dtype == kind


def test_what_is_no_experts_router_or_tensor(case, block):
    with pytest.raises(MoEError, match=r"experts must be PackedExperts .*got Linear"):
        FusedMoE(torch.nn.Linear(2, 2), torch.randn(4, 40), 2)
    with pytest.raises(MoEError, match=r"router must be a module or a weight .*got NoneType"):
        FusedMoE(case.pack(), None, 2)
    for top_k in ("2", 2.5, None):
        with pytest.raises(MoEError, match="top_k must be between 1 and the number of experts 4"):
            FusedMoE(case.pack(), torch.randn(4, 40), top_k)
    for x in (torch.tensor(1.0), [1.0]):
        with pytest.raises(MoEError, match="hidden_states must be a torch tensor"):
            block(x)
    with pytest.raises(MoEError, match="topk_ids must be a dense 2-D torch tensor on the CPU, got list"):
        block.experts(case.x, case.weights, case.ids.tolist())


def test_experts_of_another_block(case, block):
    assert FusedMoE(block.experts, torch.randn(4, 40), 2)(case.x).shape == case.x.shape


def test_one_token_without_a_batch(case, block):
    assert torch.equal(block(case.x[0]), block(case.x[:1])[0])
