"""Checkpoints as transformers and compressed-tensors write them, against the models they were written from."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import tvm_moe
from tvm_moe import CheckpointError, checkpoint, demo, reference

from . import tiny_models

# What a decoder layer calls the router and the experts, where it is not `mlp.gate` and `mlp.experts`.
ROUTER = {"gpt_oss": "mlp.router", "gemma4_text": "router"}
EXPERTS = {"gemma4_text": "experts"}
MOE_LAYERS = {"qwen2_moe": [1], "deepseek_v2": [1], "deepseek_v2_lite": [1], "deepseek_v3": [1]}
SHARED = {"qwen2_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3"}


@pytest.fixture(scope="module", params=tiny_models.MODELS)
def saved(request, tmp_path_factory):
    """(name, the model in memory, its checkpoint on disk)."""
    model, path = tiny_models.make(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return request.param, model, path


@pytest.fixture
def hidden():
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def part(model, layer, name):
    """A float32 copy of the submodule ``name`` of decoder layer ``layer``."""
    return copy.deepcopy(model.model.layers[layer].get_submodule(name)).float()


def dense(routed, num_experts):
    """``[T, E]``: the weight of every expert, whatever the order of the chosen ones."""
    weights, ids = routed
    return torch.zeros(len(ids), num_experts).scatter(1, ids.long(), weights)


def check_experts(name, model, opened):
    for i in opened.layers:
        hf, reader = model.model.layers[i].get_submodule(EXPERTS.get(name, "mlp.experts")), opened.layer(i)
        gate_up, down = hf.gate_up_proj.data, hf.down_proj.data
        if name == "gpt_oss":
            gate_up, down = gate_up.mT, down.mT
        experts = list(reader.experts())
        assert torch.equal(torch.stack([expert.w13 for expert in experts]), gate_up)
        assert torch.equal(torch.stack([expert.w2 for expert in experts]), down)
        sizes = reader.num_experts, 2 * reader.intermediate_size, reader.hidden_size
        assert (sizes, reader.top_k, reader.dtype) == (tuple(gate_up.shape), 2, "bf16")


def test_experts(saved):
    name, model, path = saved
    opened = checkpoint.open(path)
    assert opened.layers == MOE_LAYERS.get(name, [0, 1])
    assert opened.model_type == name.removesuffix("_lite")
    check_experts(name, model, opened)


def test_router(saved, hidden):
    name, model, path = saved
    opened = checkpoint.open(path)
    layer = opened.layers[-1]
    hf, reader = part(model, layer, ROUTER.get(name, "mlp.gate")), opened.layer(layer)
    bias = (part(model, layer, "mlp").e_score_correction_bias,) if name == "minimax_m2" else ()
    expected, *routed = hf(hidden, *bias)
    logits = reader.router(hidden)
    torch.testing.assert_close(logits.softmax(-1) if name == "gemma4_text" else logits, expected)
    got = dense(tvm_moe.route(logits, **reader.routing), reader.num_experts)
    torch.testing.assert_close(got, dense(routed, reader.num_experts))


def test_shared_experts(saved, hidden):
    name, model, path = saved
    opened = checkpoint.open(path)
    layer, reader = opened.layers[-1], opened.layer(opened.layers[-1])
    assert reader.has_shared_experts == (name in SHARED)
    if name not in SHARED:
        with pytest.raises(CheckpointError, match="has no shared experts"):
            reader.shared_expert(hidden)
        return
    block = part(model, layer, "mlp")
    if name == "qwen2_moe":
        expected = block.shared_expert(hidden) * block.shared_expert_gate(hidden).sigmoid()
    else:
        expected = block.shared_experts(hidden)
    torch.testing.assert_close(reader.shared_expert(hidden), expected)
    assert reader.shared_expert(hidden.bfloat16()).dtype == torch.bfloat16


def test_whole_layer(saved, hidden):
    """With what the reader says of a layer (activation, interleaving, ...) the reference gives the model's output."""
    name, model, path = saved
    opened = checkpoint.open(path)
    layer, reader = opened.layers[-1], opened.layer(opened.layers[-1])
    weights, ids = tvm_moe.route(reader.router(hidden), **reader.routing)
    stacked = {f.name: [getattr(e, f.name) for e in reader.experts()] for f in fields(checkpoint.ExpertWeights)}
    w13, w2, *rest = (None if parts[0] is None else torch.stack(parts).float() for parts in stacked.values())
    extra = dict(zip(list(stacked)[2:], rest, strict=True))
    got = reference.fused_moe(hidden, w13, w2, weights, ids, dtype="f32", **extra, **reader.options)
    if name == "gemma4_text":
        expected = part(model, layer, "experts")(hidden, ids.long(), weights)
    else:
        expected = part(model, layer, "mlp")(hidden[None])
        expected = (expected[0] if isinstance(expected, tuple) else expected).view_as(hidden)
    got = got + reader.shared_expert(hidden) if reader.has_shared_experts else got
    torch.testing.assert_close(got, expected)


def test_gpt_oss_is_read_as_strided_views_with_its_parameters(tmp_path):
    model = tiny_models.make("gpt_oss")
    model.save_pretrained(tmp_path)
    reader = checkpoint.open(tmp_path).layer(1)
    expert, hf = reader.expert(3), model.model.layers[1].mlp.experts
    assert (expert.w13.stride(), expert.w2.stride()) == ((1, 64), (1, 32))
    assert torch.equal(expert.w13_bias, hf.gate_up_proj_bias[3])
    assert torch.equal(expert.w2_bias, hf.down_proj_bias[3])
    assert (reader.activation, reader.alpha, reader.limit, reader.interleaved) == ("swigluoai", 1.702, 0.5, True)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_sharded(name, tmp_path):
    model = tiny_models.make(name)
    model.save_pretrained(tmp_path, max_shard_size="16KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check_experts(name, model, checkpoint.open(tmp_path))


def test_reading_changes_no_file(saved, hidden):
    _, _, path = saved
    before = {file: hashlib.sha256(file.read_bytes()).digest() for file in path.iterdir()}
    reader = checkpoint.open(path).layer(1)
    list(reader.experts()), reader.router(hidden), reader.routing
    assert {file: hashlib.sha256(file.read_bytes()).digest() for file in path.iterdir()} == before


def test_fused_in_memory_names_on_disk(tmp_path):
    """A state dict saved without transformers' reverse conversion has its in-memory names."""
    model = tiny_models.make("qwen3_moe")
    model.save_pretrained(tmp_path)
    tiny_models.rewrite(tmp_path, lambda tensors: {k: v.contiguous() for k, v in model.state_dict().items()})
    check_experts("qwen3_moe", model, checkpoint.open(tmp_path))


def test_base_model_without_prefix(tmp_path):
    model = tiny_models.make("olmoe")
    model.model.save_pretrained(tmp_path)
    check_experts("olmoe", model, checkpoint.open(tmp_path))


def test_text_part_of_a_multimodal_model(tmp_path):
    model = tiny_models.make("gemma4_text")
    model.save_pretrained(tmp_path)
    rename = {name: name.replace("model.", "model.language_model.", 1) for name in model.state_dict()}
    tiny_models.rewrite(tmp_path, lambda tensors: {rename[name]: tensor for name, tensor in tensors.items()})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": config}))
    check_experts("gemma4_text", model, checkpoint.open(tmp_path))


def test_files_are_unmapped_with_their_reader(tmp_path):
    tiny_models.make("qwen3_moe").save_pretrained(tmp_path)

    def mapped():
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    opened = checkpoint.open(tmp_path)
    reader = opened.layer(0)
    expert = reader.expert(0)
    del reader
    assert mapped()  # w2 is a view
    del expert
    assert not mapped()


def test_experts_come_one_at_a_time(tmp_path):
    """Walking over a layer of 35 MB allocates the expert that is looked at, not the layer."""

    def anonymous_bytes():
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    reader = checkpoint.open(demo.make_checkpoint(tmp_path / "bf16")).layer(0)
    size = sum(w.nbytes for w in (reader.expert(0).w13, reader.expert(0).w2))
    before = anonymous_bytes()
    peak = max(anonymous_bytes() for expert in reader.experts() if expert.w13.sum() + expert.w2.sum())
    assert peak - before < 8 * size  # of 32
