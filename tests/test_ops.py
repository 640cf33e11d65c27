"""The torch.library operators: what torch asks of them, torch.compile, torch.export, no gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import tvm_moe
from tests.helpers import make_case
from tvm_moe import MoEError, UnsupportedISAError, ops
from tvm_moe.layers import Experts, FusedMoE
from tvm_moe.runtime import ARRAYS

ROUTE = (4, "softmax", True, None, 1, 1, 1.0, None)


def arguments(case, packed):
    return case.x, ops.tensors(packed), packed.layer.description, case.weights, case.ids.long(), False


@pytest.fixture(params=["bf16", "int8"])
def case(request):
    return make_case(T=9, E=6, H=40, I=24, bias=True, dtype=request.param)


def test_what_torch_asks_of_an_operator(case):
    packed = case.pack()
    torch.library.opcheck(torch.ops.tvm_moe.fused_moe.default, arguments(case, packed))
    linear = tvm_moe.pack_linear(case.w2, dtype=packed.dtype)
    torch.library.opcheck(
        torch.ops.tvm_moe.fused_moe.default,
        (torch.randn(9, 24), ops.tensors(linear), linear.layer.description, case.weights, case.ids),
    )
    logits = torch.randn(9, 8)
    torch.library.opcheck(torch.ops.tvm_moe.route.default, (logits, *ROUTE))
    torch.library.opcheck(
        torch.ops.tvm_moe.route.default, (logits, 2, "sigmoid", True, torch.randn(8), 4, 2, 2.5, torch.rand(8))
    )


def test_the_operator_is_the_function(case):
    packed = case.pack()
    assert torch.equal(torch.ops.tvm_moe.fused_moe(*arguments(case, packed)), case.run(packed))
    logits = torch.randn(9, 8)
    for got, want in zip(torch.ops.tvm_moe.route(logits, *ROUTE), tvm_moe.route(logits, 4), strict=True):
        assert torch.equal(got, want)


def test_compiled_whole_for_any_number_of_tokens(case):
    packed = case.pack()

    def block(x, logits):
        weights, ids = tvm_moe.route(logits, 2)
        return x + tvm_moe.fused_moe(x, packed, weights, ids)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for T in (9, 3, 1):
        x, logits = case.x[:T], torch.randn(T, 6)
        assert torch.equal(compiled(x, logits), block(x, logits))


def test_compiled_with_out(case):
    packed = case.pack()

    def into(out):
        return tvm_moe.fused_moe(case.x, packed, case.weights, case.ids, out=out)

    out = torch.empty_like(case.x)
    assert torch.equal(torch.compile(into, fullgraph=True)(out), case.run(packed))
    assert torch.equal(out, case.run(packed))


def test_a_module_compiles(case):
    block = FusedMoE(case.pack(), torch.randn(6, 40), 2)
    x = torch.randn(2, 5, 40).bfloat16()
    assert torch.equal(torch.compile(block, fullgraph=True)(x), block(x))


def test_an_exported_program_holds_its_experts(tmp_path, case):
    """It runs in another process, which has never seen the weights."""
    block = FusedMoE(case.pack(), torch.randn(6, 40), 2).eval()
    x = torch.randn(4, 40).bfloat16()
    program = torch.export.export(block, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=1, max=64)},))
    torch.export.save(program, tmp_path / "block.pt2")
    torch.save((torch.cat([x, x]), block(torch.cat([x, x]))), tmp_path / "expected.pt")
    code = (
        "import sys, torch, tvm_moe.ops\n"
        "program = torch.export.load(sys.argv[1] + '/block.pt2').module()\n"
        "x, want = torch.load(sys.argv[1] + '/expected.pt')\n"
        "assert torch.equal(program(x), want)"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=root)


def test_no_gradient_is_an_error_and_only_if_asked_for(case):
    packed = case.pack()
    x = case.x.clone().requires_grad_()
    y = torch.ops.tvm_moe.fused_moe(x, *arguments(case, packed)[1:])
    assert torch.equal(y, case.run(packed))
    with pytest.raises(MoEError, match="tvm_moe is for inference: no gradient flows"):
        y.sum().backward()
    with torch.no_grad():
        assert not torch.ops.tvm_moe.fused_moe(x, *arguments(case, packed)[1:]).requires_grad


def test_other_threads_and_devices_say_so(case):
    packed = case.pack()
    x, *rest = arguments(case, packed)
    weights, ids = (t.to("meta") for t in rest[2:4])
    assert (
        torch.ops.tvm_moe.fused_moe(x.to("meta"), [t.to("meta") for t in rest[0]], rest[1], weights, ids).shape
        == x.shape
    )
    with pytest.raises(MoEError, match=r"hidden_states is torch.float64"):
        torch.ops.tvm_moe.fused_moe(x.double(), *rest)


def test_descriptions_are_checked(case):
    x, packed, layer, *rest = arguments(case, case.pack())

    def run(packed, layer):
        return torch.ops.tvm_moe.fused_moe(x, packed, layer, *rest)

    with pytest.raises(MoEError, match="is no description of packed experts"):
        run(packed, "experts")
    with pytest.raises(MoEError, match="packed has 7 tensors, expected the 8"):
        run(packed[1:], layer)
    with pytest.raises(MoEError, match="packed tensors w2 are not contiguous"):
        run([t.transpose(2, 3) if i == 4 else t for i, t in enumerate(packed)], layer)
    with pytest.raises(MoEError, match=r"tensor w2 is .*, expected"):
        run([t[:, :0] if i == 4 else t for i, t in enumerate(packed)], layer)
    foreign = json.dumps(json.loads(layer) | {"kernel": "int8_of_another_cpu"})
    with pytest.raises(MoEError, match="was packed for 'int8_of_another_cpu'"):
        run(packed, foreign)


def test_nothing_is_kept_alive(case):
    packed, before = case.pack(), len(ops._seen)
    case.run(packed)
    torch.ops.tvm_moe.fused_moe(*arguments(case, packed))
    gone = [weakref.ref(packed.layer.arrays[name]) for name in ("w13", "w2")]
    assert len(ops._seen) == before + 1
    del packed
    assert [tensor() for tensor in gone] == [None, None]
    assert len(ops._seen) == before


def test_tensors_that_were_served_are_looked_at_again(case):
    """Whose memory was replaced, beside others, or described otherwise."""
    packed, other = case.pack(), case.but(w2=-case.w2).pack()
    x, tensors, layer, *rest = arguments(case, packed)
    theirs = ops.tensors(other)
    first, second = case.run(packed), case.run(other)
    w2, start2 = (list(ARRAYS).index(name) for name in ("w2", "start2"))

    def run(tensors, layer=layer):
        return torch.ops.tvm_moe.fused_moe(x, tensors, layer, *rest)

    assert torch.equal(run(tensors), first)
    mixed = [theirs[i] if i in (w2, start2) else t for i, t in enumerate(tensors)]
    for _ in range(2):
        assert torch.equal(run(mixed), second)
        assert torch.equal(run(tensors), first)
    for i in (w2, start2):
        tensors[i].data = theirs[i].clone()
    assert torch.equal(run(tensors), second)
    relu = json.dumps(json.loads(layer) | {"activation": json.dumps(["gelu", 1.0, "inf"])})
    assert not torch.equal(run(tensors, relu), second)


def test_experts_as_a_module_are_the_function(case):
    packed = case.pack()
    assert torch.equal(Experts(packed)(case.x, case.weights, case.ids), case.run(packed))


def test_experts_for_a_cpu_that_is_not_this_one(case, monkeypatch):
    """As a program that was exported elsewhere would bring them: no illegal instruction."""
    packed = case.pack()
    monkeypatch.setattr(ops, "_layers", {})
    monkeypatch.setattr(ops, "_seen", {})
    monkeypatch.setattr(ops.isa, "executable", lambda kernel: (False, "this CPU lacks everything"))
    with pytest.raises(
        UnsupportedISAError, match=r"are packed for .*, but this CPU lacks everything; pack the weights"
    ):
        torch.ops.tvm_moe.fused_moe(*arguments(case, packed))


def test_inputs_on_different_devices(case):
    x, *rest = arguments(case, case.pack())
    for mixed in ((x, *rest[:2], rest[2].to("meta"), *rest[3:]), (x, *rest[:3], rest[3].to("meta"), *rest[4:])):
        with pytest.raises(MoEError, match="are on cpu, meta; all must be on the CPU"):
            torch.ops.tvm_moe.fused_moe(*mixed)


def test_what_follows_operators_sees_the_call(case):
    """Also where a call of that kind has been served before, and without torch.compile."""
    from torch.fx.experimental.proxy_tensor import make_fx

    packed = case.pack()
    module, want = Experts(packed), case.run(packed)
    for call in (lambda *a: tvm_moe.fused_moe(a[0], packed, *a[1:]), module):
        graph = make_fx(lambda *a, call=call: call(*a))(case.x, case.weights, case.ids)
        assert "tvm_moe.fused_moe.default" in [str(node.target) for node in graph.graph.nodes]
        assert torch.equal(graph(case.x, case.weights, case.ids), want)


def test_compiled_with_gradients_on(case):
    """As a model whose parameters want gradients runs: the forward pass works, the backward pass says why there is none."""
    module = Experts(case.pack())
    compiled = torch.compile(module, fullgraph=True)
    x = case.x.clone().requires_grad_()
    y = compiled(x, case.weights, case.ids)
    assert torch.equal(y, module(case.x, case.weights, case.ids))
    with pytest.raises(MoEError, match="no gradient flows"):
        y.sum().backward()


def test_dual_numbers_are_refused(case):
    from torch.autograd import forward_ad

    module = Experts(case.pack())
    with forward_ad.dual_level(), pytest.raises(MoEError, match="no gradient flows"):
        module(forward_ad.make_dual(case.x, torch.ones_like(case.x)), case.weights, case.ids)


@pytest.mark.parametrize("layer", ["null", "{}", "[1]", "3"])
def test_descriptions_that_are_none(case, layer):
    x, packed, _, *rest = arguments(case, case.pack())
    for device in ("cpu", "meta"):
        with pytest.raises(MoEError, match=r"is no description of packed experts|is no packed experts file"):
            torch.ops.tvm_moe.fused_moe(x.to(device), packed, layer, *(t.to(device) for t in rest[:2]))


def test_compiled_out_is_checked(case):
    packed = case.pack()

    @torch.compile(backend="eager")
    def into(x, out):
        return tvm_moe.fused_moe(x, packed, case.weights, case.ids, out=out)

    for out in (torch.empty(9, 40, dtype=torch.float16), torch.empty(3, 40).bfloat16(), case.x):
        with pytest.raises(Exception, match=r"out is |out overlaps"):
            into(case.x, out)


def test_experts_packed_in_inference_mode_can_be_loaded_into(case):
    with torch.inference_mode():
        module = Experts(case.pack())
    module.load_state_dict(Experts(case.pack()).state_dict())


def test_a_block_in_a_forked_child(case):
    block = FusedMoE(case.pack(), torch.randn(6, 40), 2)
    x = torch.randn(2048, 40)
    block(x)  # the team of threads exists
    child = os.fork()
    if child == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            block(x)
        os._exit(0)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    if done == (0, 0):
        os.kill(child, 9)
    assert done == (child, 0), "the child hangs"
