"""What becomes of a packed model: saved, copied, pickled, unpacked again."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch

from tests import tiny_models
from tvm_moe import MoEError, threads

pytest.importorskip("transformers", minversion="5")

import transformers
from transformers.integrations import moe

from tests import experts_modules
from tvm_moe.integrations.transformers import enable, prepare_, unprepare_
from tvm_moe.integrations.transformers.experts import PACKED
from tvm_moe.integrations.transformers.report import memory

IDS = torch.arange(3, 23)[None]
MODULES = [
    ("muse_spark", "MuseSparkExperts", {}),
    ("nemotron_h", "NemotronHExperts", {"mlp_hidden_act": "relu2"}),
    ("step3p7", "Step3p7Experts", {}),
    ("aria", "AriaExperts", {}),
]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Slow paths are said once per process; here, once per test."""
    monkeypatch.setattr(threads, "_said", set())


def bits(module):
    """Every parameter and buffer by name, as bytes: -0 is not 0."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: as_bytes(t) for name, t in tensors.items()}


def as_bytes(t):
    return t.detach().clone().reshape(-1).view(torch.uint8)


def assert_same(got, want):
    assert list(got) == list(want)
    for name, t in want.items():
        assert torch.equal(got[name], t), name


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gemma4_text", "llama4"])
def test_a_model_comes_back_bit_for_bit(name):
    model = tiny_models.small(name)
    before, classes = bits(model), [type(m) for m in model.modules()]
    expected, keys = logits(model), list(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    report = prepare_(model)
    names = unprepare_(model)
    assert names == [layer.name for layer in report.packed]
    assert_same(bits(model), before)
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == keys
    assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(logits(model), expected)
    assert {id(m.config) for m in model.model.layers.modules() if hasattr(m, "config")} == {id(model.config)}


@pytest.mark.parametrize(("family", "name", "config"), MODULES)
@pytest.mark.filterwarnings("ignore:tvm_moe. experts are not fused")
def test_other_layouts_come_back_bit_for_bit(family, name, config):
    module = experts_modules.make(family, name, **config)
    module.down_proj[0, 0, 0] = -0.0
    before = bits(module)
    prepare_(module)
    unprepare_(module)
    assert_same(bits(module), before)


def test_gradients_are_wanted_again_where_they_were():
    module = experts_modules.make()
    module.down_proj.requires_grad_(True)
    prepare_(module)
    unprepare_(module)
    assert (module.gate_up_proj.requires_grad, module.down_proj.requires_grad) == (False, True)


@pytest.mark.parametrize(
    ("dtype", "weights", "reason"),
    [("int8", torch.bfloat16, "it is packed as int8"), (None, torch.float32, "its weights were torch.float32")],
)
def test_what_was_rounded_cannot_come_back(dtype, weights, reason):
    model = tiny_models.small("qwen3_moe").to(weights)
    prepare_(model, dtype)
    expected = logits(model)
    with pytest.raises(MoEError, match=rf"layers\.0\.mlp\.experts cannot be unpacked: {reason}.*load the model again"):
        unprepare_(model)
    assert torch.equal(logits(model), expected)


def test_nothing_to_unpack():
    assert unprepare_(tiny_models.small("qwen3_moe")) == []


def test_a_packed_model_is_not_saved(tmp_path):
    model = tiny_models.small("qwen3_moe")
    prepare_(model)
    for part in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(MoEError, match=r"2 MoE layers of this model are packed .*unprepare_\(model\) first"):
            part.save_pretrained(tmp_path / "saved")
        with pytest.raises(MoEError, match="are packed"):
            part.save_pretrained(tmp_path / "saved", state_dict=part.state_dict())
    assert not (tmp_path / "saved").exists()


def test_saved_after_unpacking_it_loads_as_it_was(tmp_path):
    model = tiny_models.small("qwen3_moe")
    before = bits(model)
    prepare_(model)
    unprepare_(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(as_bytes(parameter), before[name]), name


def test_state_dict_holds_packed_weights():
    model = tiny_models.small("qwen3_moe")
    other = copy.deepcopy(model)
    for part in (model, other):
        prepare_(part)
    for module in other.modules():
        if hasattr(module, PACKED):
            getattr(module, PACKED).w13.zero_()
    assert not torch.equal(logits(other), logits(model))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4"])
def test_copies_and_pickles_work_and_come_back_too(name, monkeypatch):
    model = tiny_models.small(name)
    before = bits(model)
    prepare_(model)
    expected = logits(model)
    pickled = pickle.dumps(model)
    monkeypatch.delitem(moe.ExpertsInterface._global_mapping, "tvm_moe")  # as in another process
    copies = pickle.loads(pickled), copy.deepcopy(model)
    unprepare_(model)
    for other in copies:
        assert torch.equal(logits(other), expected)
        unprepare_(other)
        assert_same(bits(other), before)


def test_the_original_weights_are_gone():
    model = tiny_models.small("qwen3_moe")
    module = model.model.layers[0].mlp.experts
    taken = [weakref.ref(p) for p in module.parameters()]
    total = memory(model)
    report = prepare_(model)
    assert [ref() for ref in taken] == [None, None]
    assert not [*module.parameters()]
    assert (report.before, report.after) == (total, memory(model))
    assert report.before - report.after == sum(layer.before - layer.after for layer in report.packed) - layouts(model)


def layouts(model):
    """Bytes of the descriptions that packed modules carry beside their weights."""
    return sum(b.numel() for name, b in model.named_buffers() if name.endswith("layout"))


def test_one_layer_is_packed_at_a_time(monkeypatch):
    """When a layer is packed, the weights of those before it are gone."""
    model = tiny_models.small("qwen3_moe", num_hidden_layers=3)
    taken = [weakref.ref(layer.mlp.experts.gate_up_proj) for layer in model.model.layers]
    alive = []
    from tvm_moe.integrations.transformers import experts

    pack = experts.Recipe.pack
    monkeypatch.setattr(
        experts.Recipe,
        "pack",
        lambda self, *args: alive.append(sum(ref() is not None for ref in taken)) or pack(self, *args),
    )
    prepare_(model)
    assert alive == [3, 2, 1]


def test_loaded_by_name_it_needs_no_preparation(tmp_path):
    enable()
    tiny_models.small("qwen3_moe").save_pretrained(tmp_path)
    model, loaded = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation=name)
        for name in ("eager", "tvm_moe")
    )
    prepare_(model)
    with pytest.warns(UserWarning, match="packed when they first run"):
        got = logits(loaded)
    assert torch.equal(got, logits(model))
    with pytest.raises(MoEError, match="2 MoE layers of this model are packed"):
        loaded.save_pretrained(tmp_path / "again")
