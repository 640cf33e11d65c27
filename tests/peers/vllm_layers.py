"""vLLM's own MoE layers with our experts in them, without a server. Run by test_vllm.py in an environment with vLLM.

Layers come from vLLM's factory, weights from `make_case`; vLLM's methods choose the experts, process and apply them.
"""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.oracle import int8, unquantized
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt8DynamicTokenSym, kInt8StaticChannelSym

import tvm_moe
from tests.conftest import require
from tests.helpers import U_BF16, assert_matches_reference, make_case
from tvm_moe import MoEError, threads
from tvm_moe.integrations import vllm as plugin
from tvm_moe.integrations.vllm.experts import TVMMoEBF16Experts, TVMMoEInt8Experts, use_bound_threads

AMX = torch.cpu._is_amx_tile_supported()
OURS = {"bf16": TVMMoEBF16Experts, "int8": TVMMoEInt8Experts}
KEYS = {"bf16": (None, None), "int8": (kInt8StaticChannelSym, kInt8DynamicTokenSym)}
QUANTIZED = {
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
SIZES = {"T": 7, "E": 6, "H": 64, "I": 32, "k": 2}
# vLLM's activation and its parameters -> ours
ACTIVATIONS = {
    "silu": ({}, {"activation": "silu"}),
    "silu clamped": ({"swiglu_limit": 0.5}, {"activation": "silu", "limit": 0.5}),
    "gelu": ({}, {"activation": "gelu"}),
    "gelu_tanh": ({}, {"activation": "gelu_tanh"}),
    "swigluoai": ({}, {"activation": "swigluoai"}),
    "swigluoai_uninterleave": (
        {"swiglu_limit": 0.5, "swiglu_alpha": 1.3, "swiglu_beta": 1.0},
        {"activation": "swigluoai", "limit": 0.5, "alpha": 1.3},
    ),
    "swiglustep": ({}, {"activation": "swiglustep", "limit": 7.0}),
}


@pytest.fixture(scope="module", autouse=True)
def config(tmp_path_factory):
    """One process as a whole deployment of vLLM."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('gloo')}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield config


@pytest.fixture(autouse=True)
def lists(monkeypatch):
    """vLLM's lists as they are without the plugin, which each test puts in as it needs it."""
    for oracle in (unquantized, int8):
        theirs = oracle.backend_to_kernel_cls
        monkeypatch.setattr(oracle, "backend_to_kernel_cls", getattr(theirs, "__wrapped__", theirs))
    monkeypatch.delenv(plugin.ENVIRONMENT, raising=False)


@pytest.fixture
def first(monkeypatch):
    """The plugin before all of vLLM's own: numbers do not depend on what vLLM has for this CPU."""
    monkeypatch.setenv(plugin.ENVIRONMENT, "first")
    plugin.register()


@pytest.fixture
def make(config):
    """vLLM's layer with the weights of a case, not yet processed."""

    def make(case, activation="silu", **options):
        E, _, H = case.w13.shape
        quantized = case.w13.dtype == torch.int8
        config.compilation_config.static_forward_context.clear()
        runner = FusedMoEFactory(
            E, case.ids.shape[1], H, case.w2.shape[2], params_dtype=torch.bfloat16, prefix="model.layers.0.mlp.experts",
            activation=activation, quant_config=CompressedTensorsConfig.from_config(QUANTIZED) if quantized else None,
            has_bias="w13_bias" in case.options, **options,
        )  # fmt: skip
        layer = runner.routed_experts
        for name in ("w13", "w2"):
            getattr(layer, f"{name}_weight").data.copy_(getattr(case, name))
            if quantized:
                getattr(layer, f"{name}_weight_scale").data.copy_(case.options[f"{name}_scale"][..., None])
            if f"{name}_bias" in case.options:
                getattr(layer, f"{name}_bias").data.copy_(case.options[f"{name}_bias"])
        return runner

    return make


def processed(runner):
    layer = runner.routed_experts
    layer.quant_method.process_weights_after_loading(layer)
    return runner


def experts_of(runner):
    return runner.routed_experts.quant_method.moe_kernel.fused_experts


def apply(runner, case):
    layer = runner.routed_experts
    with torch.no_grad():
        return layer.quant_method.apply(layer, case.x, case.weights, case.ids, None, None)


def case_of(kind, **options):
    case = make_case(weights=kind, **SIZES | options)
    for name in ("w13_bias", "w2_bias"):  # vLLM keeps them in the model's dtype
        if name in case.options:
            case.options[name] = case.options[name].bfloat16().float()
    return case


kinds = pytest.mark.parametrize("kind", ["bf16", "int8"])


@kinds
@pytest.mark.skipif(AMX, reason="vLLM has kernels of its own for a CPU with AMX")
def test_the_experts_vllm_chooses_on_this_cpu(kind, make):
    require("avx512_vnni", kind)
    plugin.register()
    plugin.register()  # vLLM may call it again
    runner = processed(make(case_of(kind)))
    assert type(experts_of(runner)) is OURS[kind]
    assert experts_of(runner).experts.packed.dtype == kind


@pytest.mark.skipif(AMX, reason="vLLM has INT8 experts for a CPU with AMX")
def test_without_the_plugin_vllm_has_no_int8_experts_here(make):
    with pytest.raises(NotImplementedError, match="No Int8 MoE backend supports the deployment configuration"):
        make(case_of("int8"))


@kinds
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results(kind, activation, first, make):
    given, ours = ACTIVATIONS[activation]
    # gpt-oss's rows alternate, but vLLM puts an INT8 checkpoint's two matrices one after the other.
    alternate = {"interleaved": True} if (activation, kind) == ("swigluoai", "bf16") else {}
    case = case_of(kind, bias=True, **ours, **alternate)
    runner = processed(make(case, activation.split()[0], **given))
    assert type(experts_of(runner)) is OURS[kind]
    assert_matches_reference(apply(runner, case), case)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
def test_vllms_own_experts_compute_the_same(activation, make):
    case = case_of("bf16", activation=activation, interleaved=activation == "swigluoai")
    runner = processed(make(case, activation))
    assert isinstance(experts_of(runner), CPUUnquantizedExperts)
    assert_matches_reference(apply(runner, case), case, rounding=U_BF16)


@kinds
def test_sizes_that_vllms_kernels_refuse(kind, first, make):
    case = case_of(kind, H=50, I=33)
    assert_matches_reference(apply(processed(make(case)), case), case)


@kinds
def test_a_whole_layer_eager_and_compiled(kind, first, make, config):
    """vLLM routes; on the CPU its compiler traces through the layer into our operator."""
    case = case_of(kind)
    runner = processed(make(case, renormalize=True))
    compiled = torch.compile(runner, fullgraph=True, dynamic=True)
    logits = torch.randn(7, 6)
    with set_forward_context(None, config), torch.no_grad():
        for T in (7, 3):
            x = case.x[:T]
            got = runner(x, logits[:T])
            weights, ids = runner.router.select_experts(hidden_states=x, router_logits=logits[:T])
            assert_matches_reference(got, case.but(x=x, weights=weights, ids=ids))
            assert torch.equal(compiled(x, logits[:T]), got)


@kinds
def test_a_rank_of_expert_parallelism(kind, first, make):
    """Experts 2 to 7 of 8 are here; the others' slots, and padding, add nothing."""
    case = case_of(kind)
    runner = processed(make(case))
    expert_map = torch.tensor([-1, -1, 0, 1, 2, 3, 4, 5], dtype=torch.int32)
    ids = case.ids + 2
    ids[0] = torch.tensor([0, 1])
    ids[1, 1] = -1
    local = case.but(ids=torch.where(ids < 0, -1, expert_map[ids.clamp(min=0)]))
    layer = runner.routed_experts
    got = layer.quant_method.moe_kernel.apply(
        case.x, layer.w13_weight, layer.w2_weight, case.weights, ids, layer.activation, 8, expert_map, False
    )
    assert not got[0].any()
    assert_matches_reference(got, local)


@kinds
def test_router_weights_on_the_input(kind, first, make):
    case = case_of(kind, k=1).but(weights=torch.rand(7, 1))
    got = apply(processed(make(case, apply_router_weight_on_input=True)), case)
    # vLLM multiplies in BF16 before it calls the experts.
    x = case.x * case.weights.bfloat16()
    assert_matches_reference(got, case.but(x=x, weights=torch.ones_like(case.weights)))


@kinds
def test_memory_holds_the_weights_once(kind, first, make):
    """96 MB of BF16 weights: what is left afterwards is the packed layer."""
    before = psutil.Process().memory_info().rss
    runner = make(make_case(T=1, E=16, H=1024, I=1024, weights=kind))
    layer = runner.routed_experts
    gone = [weakref.ref(layer.w13_weight), weakref.ref(layer.w2_weight)]
    processed(runner)
    gc.collect()
    assert [w() for w in gone] == [None, None]
    assert layer.w13_weight.shape == (16, 2048, 0)
    packed = experts_of(runner).experts.packed.nbytes
    assert packed > 48e6
    assert psutil.Process().memory_info().rss - before < 1.25 * packed


def why_not(runner, kind, **changes):
    """The reason for a layer like this one, but for ``changes``."""
    moe = replace(runner.moe_config, **changes)
    supported, reason = OURS[kind].is_supported_config(OURS[kind], moe, *KEYS[kind], FusedMoEActivationFormat.Standard)
    assert supported == (reason is None)
    return reason


@kinds
def test_reasons(kind, first, make, monkeypatch, caplog):
    runner = make(case_of(kind))
    ask = partial(why_not, runner, kind)
    parallel = runner.moe_config.moe_parallel_config
    activation = type(runner.moe_config.activation)
    assert ask() is None
    with caplog.at_level("INFO", logger="vllm"):
        assert ask(activation=activation.GELU) is None
        assert "takes no limit, got limit=2.0" in ask(activation=activation.GELU, swiglu_limit=2.0)
    assert f"tvm_moe does not serve these {kind} experts: activation 'gelu' takes no limit" in caplog.text
    assert "SITU activation" in ask(activation=activation.SITU)
    assert "with beta=0.5" in ask(activation=activation.SWIGLUOAI, swiglu_beta=0.5)
    assert "parallel config" in ask(moe_parallel_config=replace(parallel, enable_eplb=True))
    assert "LoRA" in ask(is_lora_enabled=True)
    half = ask(in_dtype=torch.float16)
    assert half is None if kind == "int8" else "runs in torch.float16, they need bfloat16" in half
    asked = runner.moe_config, *KEYS["int8" if kind == "bf16" else "bf16"], FusedMoEActivationFormat.Standard
    assert "quantization scheme" in OURS[kind].is_supported_config(OURS[kind], *asked)[1]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert ask() is None


def test_a_cpu_without_a_better_bf16_kernel_is_left_to_vllm(make, monkeypatch):
    plugin.register()
    monkeypatch.setenv("TVM_MOE_ISA", "generic")
    runner = make(case_of("bf16"))
    assert runner.routed_experts.quant_method.experts_cls is CPUUnquantizedExperts or AMX
    assert "only portable kernels run on this CPU" in why_not(runner, "bf16")
    assert why_not(runner, "int8") is None


def test_places_in_vllms_lists():
    CPU = unquantized.UnquantizedMoeBackend.CPU
    own = [unquantized.backend_to_kernel_cls(CPU), int8.backend_to_kernel_cls(int8.Int8MoeBackend.CPU)]
    plugin.register()
    assert unquantized.backend_to_kernel_cls(CPU) == [*own[0][:-1], TVMMoEBF16Experts, CPUUnquantizedExperts]
    assert int8.backend_to_kernel_cls(int8.Int8MoeBackend.CPU) == [*own[1], TVMMoEInt8Experts]
    assert TVMMoEInt8Experts not in int8.backend_to_kernel_cls(int8.Int8MoeBackend.TRITON)


def test_first_and_off(monkeypatch):
    CPU = unquantized.UnquantizedMoeBackend.CPU
    own = unquantized.backend_to_kernel_cls(CPU)
    monkeypatch.setenv(plugin.ENVIRONMENT, "0")
    plugin.register()
    assert unquantized.backend_to_kernel_cls(CPU) == own
    monkeypatch.setenv(plugin.ENVIRONMENT, "first")
    plugin.register()
    assert unquantized.backend_to_kernel_cls(CPU) == [TVMMoEBF16Experts, *own]


def test_a_vllm_that_does_not_fit_keeps_its_own(monkeypatch, caplog):
    monkeypatch.setattr("tvm_moe.integrations.vllm.offer.unquantized.UnquantizedMoeBackend", object())
    with caplog.at_level("WARNING", logger="vllm"):
        plugin.register()
    assert "written for vLLM 0.32 and does not fit this one" in caplog.text


@kinds
def test_weights_that_were_not_packed_are_never_used(kind, first, make):
    case = case_of(kind)
    runner = processed(make(case))
    layer = runner.routed_experts
    layer.w13_weight = torch.nn.Parameter(case.w13.clone(), requires_grad=False)  # as after an update in place
    with pytest.raises(MoEError, match="not packed, or were replaced since"):
        apply(runner, case)


def test_packing_again_what_is_packed(first, make):
    runner = processed(make(case_of("int8")))
    with pytest.raises(MoEError, match="packed already"):
        processed(runner)


def test_bound_threads(monkeypatch):
    """vLLM's workers bind the calling thread to one core."""
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(threads, "quota", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        threads._allowed_until = 0.0
        assert tvm_moe.get_num_threads() == 1
        use_bound_threads()
        assert tvm_moe.get_num_threads() == 3
    finally:
        os.sched_setaffinity(0, allowed)
        tvm_moe.set_num_threads(None)
