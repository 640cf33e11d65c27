"""Damaged, incomplete and foreign checkpoints: each error names the file, the tensor, and what to do."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tvm_moe import CheckpointError, MoEError, checkpoint

from . import tiny_models

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def folder(tmp_path):
    tiny_models.make("qwen3_moe").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    tiny_models.make("qwen3_moe").save_pretrained(tmp_path, max_shard_size="16KB")
    return tmp_path


def configure(folder, **changes):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def read_all(folder):
    opened = checkpoint.open(folder)
    for reader in map(opened.layer, opened.layers):
        reader.router(torch.zeros(1, 32))
        list(reader.experts())


def fails(folder, *parts):
    """Reading everything raises a CheckpointError of one line with all ``parts`` in it."""
    with pytest.raises(CheckpointError) as error:
        read_all(folder)
    assert all(str(part) in str(error.value) for part in parts), error.value
    assert "\n" not in str(error.value)


def test_no_such_folder(tmp_path):
    fails(tmp_path / "absent", tmp_path / "absent", "no such checkpoint folder; download it first")


def test_a_file_instead_of_a_folder(folder):
    fails(folder / "model.safetensors", "no such checkpoint folder; give its folder")


def test_no_config(folder):
    (folder / "config.json").unlink()
    fails(folder, folder / "config.json", "No such file")


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON"), ("[1]", "expected a JSON object")])
def test_config_that_is_no_json_object(folder, text, message):
    (folder / "config.json").write_text(text)
    fails(folder, folder / "config.json", message)


def test_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    fails(folder, "holds neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_truncated(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    fails(folder, file, "truncated or not a safetensors file", "again")


def test_truncated_shard(sharded):
    shard = sorted(sharded.glob("model-*"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    fails(sharded, shard, "truncated")


def test_index_names_an_absent_shard(sharded):
    shard = sorted(sharded.glob("model-*"))[1]
    shard.unlink()
    fails(sharded, "model.safetensors.index.json", shard.name, "which is not in")


def test_index_leads_out_of_the_folder(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    fails(sharded, "'../model-00001", "which is not in")


def test_index_names_a_tensor_its_shard_lacks(sharded):
    index = sharded / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["ghost"] = value["weight_map"][GATE]
    index.write_text(json.dumps(value))
    fails(sharded, value["weight_map"][GATE], "'ghost' is missing")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_index_without_a_map(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    fails(sharded, "has no weight_map")


@pytest.mark.parametrize("name", [GATE, "model.layers.1.mlp.gate.weight"])
def test_missing_tensor(folder, name):
    tiny_models.rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    fails(folder, folder, repr(name), "is missing")


def test_missing_layer(folder):
    tiny_models.rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if ".layers.1." not in k})
    fails(folder, "tensors of layer 1 are missing")


@pytest.mark.parametrize(
    ("changes", "got", "expected"),
    [
        ({"moe_intermediate_size": 32}, "(24, 32)", "(32, 32)"),
        ({"hidden_size": 64}, "(6, 32)", "(6, 64)"),
        ({"num_local_experts": 5}, "(6, 32)", "(5, 32)"),
    ],
)
def test_shapes_that_disagree_with_the_config(folder, changes, got, expected):
    configure(folder, **changes)
    fails(folder, folder / "model.safetensors", f"has shape {got}, expected {expected}", "config.json")


@pytest.mark.parametrize(
    ("dtype", "got"), [(torch.float16, "F16"), (torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_mixed_dtypes(folder, dtype, got):
    tiny_models.rewrite(folder, lambda tensors: {**tensors, GATE: tensors[GATE].to(dtype)})
    fails(folder, folder / "model.safetensors", repr(GATE), f"has dtype {got}, expected BF16")


def test_int8_without_a_quantization_config(folder):
    def to_int8(tensors):
        return {k: v.to(torch.int8) if "experts" in k else v for k, v in tensors.items()}

    tiny_models.rewrite(folder, to_int8)
    fails(folder, "has dtype I8, expected BF16 or F16 or F32")


def test_int8_without_a_scale(folder):
    from .test_checkpoint_int8 import compress

    compress(folder)
    tiny_models.rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if k != f"{GATE}_scale"})
    fails(folder, f"'{GATE}_scale' is missing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; expected one of ['qwen3_moe'"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"num_local_experts": 0}, "is 0, expected a positive integer"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok or top_k_experts is None, expected a positive integer"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected a positive integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"mlp_only_layers": [0, 1]}, "describes a dense model"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' of qwen3_moe is not supported, only 'softmax'"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' of qwen3_moe is not supported"),
    ],
)
def test_config_that_cannot_be_read(folder, changes, message):
    configure(folder, **changes)
    fails(folder, message)


def test_unknown_activation(folder):
    configure(folder, hidden_act="mish")
    with pytest.raises(MoEError, match="unknown activation 'mish'"):
        checkpoint.open(folder).layer(0)


def test_dense_layers_are_refused_by_index(tmp_path):
    tiny_models.make("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape("layer 0 has no experts; those that have: [1]")):
        checkpoint.open(tmp_path).layer(0)


@pytest.mark.parametrize(
    "change", [{"model_type": ["a"]}, {"decoder_sparse_step": "a"}, {"mlp_only_layers": 5}], ids=str
)
def test_values_of_an_unexpected_kind(change, tmp_path):
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint.open(tmp_path)


def test_gpt_oss_with_experts_one_by_one(tmp_path):
    """Their biases would be lost, and their rows taken for interleaved ones."""
    tiny_models.make("gpt_oss").save_pretrained(tmp_path)

    def separate(tensors):
        fused = [name for name in tensors if name.endswith(".experts.gate_up_proj")]
        for name in fused:
            w13, w2 = tensors.pop(name), tensors.pop(name.replace("gate_up", "down"))
            for e in range(len(w13)):
                for part, w in (("gate", w13[e, :, 0::2].T), ("up", w13[e, :, 1::2].T), ("down", w2[e].T)):
                    tensors[name.replace("gate_up_proj", f"{e}.{part}_proj.weight")] = w.contiguous()
        return tensors

    tiny_models.rewrite(tmp_path, separate)
    fails(tmp_path, "are read as fused tensors (experts.gate_up_proj), not one by one")
