"""The forward of one experts module: skipped ids, compilation, gradients, packing at the first call."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import U_BF16, assert_matches_reference
from tvm_moe import MoEError, SlowPathWarning, threads

pytest.importorskip("transformers", minversion="5")

from tests import experts_modules
from tests.experts_modules import E, case, inputs
from tvm_moe.integrations.transformers import enable, prepare_
from tvm_moe.integrations.transformers.experts import PACKED, install, read


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Slow paths are said once per process; here, once per test."""
    monkeypatch.setattr(threads, "_said", set())


@pytest.mark.parametrize("parallel", [False, True])
def test_ids_of_other_ranks_are_skipped(parallel):
    module, (x, ids, weights) = experts_modules.make(), inputs()
    module._is_expert_parallel = parallel
    ids[:, 0] = E
    ids[1], weights[1] = E, 0
    expected = case(module, (x, ids, weights))
    prepare_(module)
    got = module(x, ids, weights)
    assert_matches_reference(got, expected)
    assert not got[1].any()


@pytest.mark.parametrize(
    ("family", "name", "config"),
    [
        ("gpt_oss", "GptOssExperts", {"swiglu_limit": 0.75, "swiglu_alpha": 1.702}),
        ("muse_spark", "MuseSparkExperts", {}),
        ("step3p7", "Step3p7Experts", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:tvm_moe. experts are not fused")
def test_a_packed_module_compiles_whole(family, name, config):
    module, called = experts_modules.make(family, name, **config), inputs()
    prepare_(module)
    want = module(*called)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(*called), want)


def test_compiling_what_is_not_packed_says_what_to_do():
    enable()
    module = experts_modules.make(experts_implementation="tvm_moe")
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"call tvm_moe\.integrations\.transformers\.prepare_"):
        torch.compile(module, fullgraph=True, backend="eager")(*inputs())
    assert module.gate_up_proj is not None


def test_by_name_alone_a_module_is_packed_when_it_first_runs():
    enable()
    module, called = experts_modules.make(experts_implementation="tvm_moe"), inputs()
    expected = case(module, called)
    with pytest.warns(SlowPathWarning, match="packed when they first run: call prepare_"):
        first = module(*called)
    assert_matches_reference(first, expected)
    assert not [*module.parameters()]
    assert torch.equal(module(*called), first)  # and says nothing


def test_by_name_alone_a_module_that_cannot_be_packed_runs_as_before():
    enable()
    module, called = experts_modules.make(experts_implementation="tvm_moe"), inputs()
    module.num_experts = E + 1
    with pytest.warns(SlowPathWarning, match=f"eager implementation: it has weights of {E} experts"):
        got = module(*called)
    module.config._experts_implementation = "eager"
    assert torch.equal(got, module(*called))


def test_no_gradient_flows_and_the_error_says_so():
    module, (x, ids, weights) = experts_modules.make(), inputs()
    prepare_(module)
    y = module(x.requires_grad_(), ids, weights)
    with pytest.raises(MoEError, match="inference: no gradient flows"):
        y.sum().backward()


def test_packed_weights_never_meet_another_implementation():
    """A config is shared by all layers, and by models made of it; the choice of a packed module is its own."""
    module, other = experts_modules.make(), experts_modules.make()
    other.config = module.config
    called = inputs()
    expected = case(module, called)
    prepare_(module)
    other.config._experts_implementation = "batched_mm"
    assert_matches_reference(module(*called), expected)
    assert_matches_reference(other(*called), expected, rounding=U_BF16)
    assert hasattr(module, PACKED)
    assert not hasattr(other, PACKED)


def test_install_takes_what_was_packed_elsewhere():
    module, called = experts_modules.make(), inputs()
    expected = case(module, called)
    packed = read(module).pack()
    install(module, packed)
    assert not [*module.parameters()]
    assert_matches_reference(module(*called), expected)
