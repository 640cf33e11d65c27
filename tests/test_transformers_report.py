"""What `prepare_` reports: what it packed, and what it left alone, with the reason."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests import roundings, tiny_models
from tests.helpers import Case, assert_matches_reference, assert_within
from tvm_moe import MoEError, SlowPathWarning, UnsupportedISAError, reference, threads

pytest.importorskip("transformers", minversion="5")

import transformers

from tests import experts_modules
from tests.experts_modules import E, H, I, inputs
from tvm_moe.integrations.transformers import prepare_
from tvm_moe.integrations.transformers.experts import PACKED
from tvm_moe.integrations.transformers.report import PackedLayer, Report

IDS = torch.arange(3, 23)[None]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Slow paths are said once per process; here, once per test."""
    monkeypatch.setattr(threads, "_said", set())


def test_the_text_of_a_report():
    mib = 2**20
    layer = PackedLayer("layers.0.mlp.experts", "int8", "silu", "generic", 3000 * mib, 1536 * mib, "its reason")
    report = Report([layer], [("layers.1.mlp.experts", "it is odd")], ["layers.2.mlp.experts"], 4000 * mib, 2536 * mib)
    assert str(report).splitlines() == [
        "tvm_moe packed 1 MoE layer; the model takes 4,000.0 MiB -> 2,536.0 MiB",
        "  layers.0.mlp.experts: int8, silu, generic, 3,000.0 MiB -> 1,536.0 MiB, not fused: its reason",
        "  layers.2.mlp.experts: packed before, nothing changed",
        "  layers.1.mlp.experts: left to transformers: it is odd",
    ]


def test_a_report_of_a_model():
    model = tiny_models.small("gpt_oss")
    module = model.model.layers[1].mlp.experts
    size = sum(p.nbytes for p in module.parameters())
    report = prepare_(model, isa="generic")
    layer = report.packed[1]
    assert layer.name == "model.layers.1.mlp.experts"
    assert (layer.dtype, layer.isa) == ("bf16", "generic")
    assert layer.activation == "swigluoai(alpha=1.702, limit=0.5)"
    assert (layer.before, layer.after) == (size, getattr(module, PACKED).packed.nbytes)


def test_the_second_time_nothing_changes_and_the_report_says_so():
    model = tiny_models.small("qwen3_moe")
    prepare_(model)
    state = {name: t.data_ptr() for name, t in model.named_buffers()}
    with pytest.raises(MoEError, match="was packed as bf16 before and cannot become int8; load the model again"):
        prepare_(model, "int8")
    report = prepare_(model, "bf16")
    assert (report.packed, report.left) == ([], [])
    assert report.already == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert "model.layers.0.mlp.experts: packed before, nothing changed" in str(report)
    assert {name: t.data_ptr() for name, t in model.named_buffers()} == state


@pytest.mark.parametrize(
    ("terminal", "progress", "shown"), [("0", True, False), ("1", True, True), ("1", False, False)]
)
def test_a_progress_bar_is_for_terminals(capsys, monkeypatch, terminal, progress, shown):
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)  # what rich takes for the answer
    prepare_(experts_modules.make(), progress=progress)
    out, err = capsys.readouterr()
    assert (out, "packing experts" in err) == ("", shown)
    assert shown or not err


def left(model, reason, dtype=None):
    """The one layer left alone, which is as it was."""
    before = dict(model.named_parameters())
    with pytest.warns(SlowPathWarning, match=f"experts are left to transformers: .*{reason}"):
        report = prepare_(model, dtype)
    assert all(p is before[name] for name, p in model.named_parameters())
    (found,) = report.left
    assert found[1] in str(report)
    assert not report.packed


def test_unknown_experts_are_left_alone():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    left(Odd(), r"ModuleList does not ask for other implementations \(use_experts_implementation\)")


def test_a_forward_of_its_own_is_left_alone(monkeypatch):
    module = experts_modules.make()
    own = type("Own", (type(module),), {"forward": lambda self, x, ids, weights: x})
    module.__class__ = own
    left(nn.ModuleDict({"experts": module}), "Own does not ask for other implementations")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "num_experts", 3), f"weights of {E} experts and says num_experts = 3"),
        (lambda m: delattr(m, "down_proj"), "it has no parameter down_proj"),
        (lambda m: m.to("meta"), "its weights are on meta: load or move the model"),
        (lambda m: m.to(torch.float8_e4m3fn), "gate_up_proj is Tensor torch.float8_e4m3fn"),
    ],
)
def test_weights_that_cannot_be_packed_are_left_alone(change, reason):
    module = experts_modules.make()
    change(module)
    left(module, reason)


def test_weights_that_cannot_be_quantized_are_left_alone():
    module = experts_modules.make()
    module.down_proj[3] = torch.nan
    left(module, r"expert 3, w2: weights or scales are not finite", "int8")


def test_shared_weights_are_left_alone():
    """Packing them twice would take more memory, and unpacking would part them."""
    first, second = (experts_modules.make() for _ in range(2))
    first.down_proj = second.down_proj
    with pytest.warns(SlowPathWarning, match="its weights are shared with another module"):
        report = prepare_(nn.ModuleList([first, second]))
    assert [name for name, _ in report.left] == ["0", "1"]


def test_one_module_in_two_places_is_packed_once():
    module = experts_modules.make()
    model = nn.ModuleList([module, module])
    assert len(prepare_(model).packed) == 1
    assert hasattr(model[1], PACKED)


def test_llama4_with_two_experts_a_token_is_left_alone():
    model = tiny_models.small("llama4", num_experts_per_tok=2, num_hidden_layers=1)
    left(model, "it weights the inputs of 2 experts a token")
    with torch.no_grad():
        model(IDS)


def test_a_model_without_experts_is_said_to_have_none():
    with pytest.warns(SlowPathWarning, match="found no experts"):
        report = prepare_(nn.Linear(4, 4))
    assert "no experts were found" in str(report)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "path"}, MoEError, "takes a transformers model, got str"),
        ({"dtype": "int4"}, MoEError, "dtype='int4' is not supported; expected None, 'bf16' or 'int8'"),
        ({"isa": "avx1024"}, UnsupportedISAError, "avx1024"),
    ],
)
def test_wrong_arguments_change_nothing(arguments, error, message):
    model = experts_modules.make()
    with pytest.raises(error, match=message):
        prepare_(**{"model": model, **arguments})
    assert not hasattr(model, PACKED)


def test_a_model_with_configs_inside_its_config():
    """Experts of the text part of a model for images, whose own config chooses nothing for them."""
    text = {**tiny_models.BASE, **tiny_models.QWEN, "head_dim": 8, "intermediate_size": 40}
    vision = {"hidden_size": 16, "num_heads": 2, "depth": 1, "intermediate_size": 16, "out_hidden_size": 32}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, attn_implementation="eager")
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16).eval().requires_grad_(False)
    model.set_experts_implementation("eager")
    ours = copy.deepcopy(model)
    assert len(prepare_(ours).packed) == 2
    ours.set_experts_implementation("grouped_mm")  # which packed experts do not hear
    spread = roundings.Spread(model, IDS)
    got, _ = roundings.logits(ours, IDS, spread.choices)
    assert_within(got, spread.exact, spread.bound)


def quantized(w, **changes):
    """As torchao's Int8Tensor looks: the parts that are read."""
    q, scale = reference.quantize_weight(w)
    w.qdata, w.scale, w.zero_point = q, scale[..., None], torch.zeros_like(scale[..., None], dtype=torch.int8)
    for name, value in changes.items():
        setattr(w, name, value)
    return w


def test_int8_weights_with_scales_are_packed_as_they_are():
    module = experts_modules.make()
    x, ids, weights = inputs()
    stored = [quantized(w) for w in (module.gate_up_proj, module.down_proj)]
    options = {f"{name}_scale": w.scale for name, w in zip(("w13", "w2"), stored, strict=True)}
    case = Case(x, *(w.qdata for w in stored), weights, ids, options)
    report = prepare_(module)
    assert report.packed[0].dtype == "int8"
    assert report.packed[0].before == E * (3 * I * H + 4 * (2 * I + H))
    assert_matches_reference(module(x, ids, weights), case)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero_point": torch.ones(1)}, "zero points"),
        ({"act_pre_scale": torch.ones(1)}, "scales for its input"),
        ({"scale": torch.ones(E, 1, 1)}, r"expected int8 \[E, N, K\] and \[E, N, 1\]"),
        ({"qdata": torch.zeros(E, H, I, dtype=torch.uint8)}, "uint8"),
    ],
)
def test_other_quantizations_are_left_alone(changes, reason):
    module = experts_modules.make()
    quantized(module.gate_up_proj)
    quantized(module.down_proj, **changes)
    left(module, reason)


def test_int8_experts_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    module = experts_modules.make()
    stored = {}
    for name in ("gate_up_proj", "down_proj"):
        made = Int8Tensor.from_hp(getattr(module, name).data, quantization.PerRow())
        stored[name] = SimpleNamespace(qdata=made.qdata, scale=made.scale)
        setattr(module, name, nn.Parameter(made, requires_grad=False))
    x, ids, weights = inputs()
    w13, w2 = stored.values()
    case = Case(x, w13.qdata, w2.qdata, weights, ids, {"w13_scale": w13.scale, "w2_scale": w2.scale})
    assert prepare_(module).packed[0].dtype == "int8"
    assert_matches_reference(module(x, ids, weights), case)
