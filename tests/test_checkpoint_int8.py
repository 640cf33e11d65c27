"""compressed-tensors INT8: checkpoints its own library wrote, the demo's twin, and the schemes that are refused."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import nn

from tvm_moe import CheckpointError, checkpoint, demo

from . import tiny_models


def linears(tensors):
    """A module tree with one nn.Linear for every ``*.weight`` matrix: what compressed-tensors quantizes."""
    root = nn.Module()
    for name, weight in tensors.items():
        *path, last, leaf = name.split(".")
        if weight.dim() == 2 and leaf == "weight" and last != "embed_tokens":
            parent = root
            for step in path:
                parent = parent._modules.setdefault(step, nn.Module())
            parent.add_module(last, nn.Linear(*weight.shape[::-1], bias=False))
            parent._modules[last].weight.data = weight
    return root


def compress(folder, ignore=("lm_head", "re:.*gate$"), scheme="W8A8"):
    """Quantizes a checkpoint in place with the compressed-tensors library; returns its own dequantization."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    root = linears(tensors)
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(root, QuantizationConfig(config_groups=groups, ignore=list(ignore)))
    for module in root.modules():
        if hasattr(module, "quantization_scheme"):
            rows = module.weight.amin(1, keepdim=True), module.weight.amax(1, keepdim=True)
            scale, _ = calculate_qparams(*rows, module.quantization_scheme.weights)
            module.weight_scale.data = scale
    compressor = ModelCompressor.from_pretrained_model(root)
    compressor.compress_model(root)
    save_file({**tensors, **root.state_dict()}, folder / "model.safetensors")
    compressor.update_config(folder)
    compressor.decompress_model(root)
    return {name: tensor.float() for name, tensor in root.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "path", "projections"),
    [
        ("qwen3_moe", "model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "model.layers.1.block_sparse_moe", ("w1", "w3", "w2")),
        ("deepseek_v3", "model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_written_by_compressed_tensors(name, path, projections, tmp_path):
    tiny_models.make(name).save_pretrained(tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    expected = compress(tmp_path)
    reader = checkpoint.open(tmp_path).layer(1)
    assert reader.dtype == "int8"
    for e, expert in enumerate(reader.experts()):
        assert (expert.w13.dtype, expert.w2.dtype, expert.w13.min()) == (torch.int8, torch.int8, -128)
        gate, up, down = (expected[f"{path}.experts.{e}.{projection}.weight"] for projection in projections)
        # The library dequantizes in bf16: one rounding, 2^-9, away from the product in f32.
        got13, got2 = expert.w13 * expert.w13_scale[:, None], expert.w2 * expert.w2_scale[:, None]
        torch.testing.assert_close(got13, torch.cat([gate, up]), rtol=2**-8, atol=0)
        torch.testing.assert_close(got2, down, rtol=2**-8, atol=0)
    assert torch.equal(reader.router_weight(), original[f"{path}.gate.weight"].float())


def test_quantized_shared_experts_are_dequantized(tmp_path):
    tiny_models.make("deepseek_v3").save_pretrained(tmp_path)
    weights = compress(tmp_path)
    gate, up, down = (weights[f"model.layers.1.mlp.shared_experts.{p}_proj.weight"] for p in ("gate", "up", "down"))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    expected = (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    got = checkpoint.open(tmp_path).layer(1).shared_expert(x)
    # Three matrices, each 2^-9 away (see above); the sums do not grow a relative error of the whole output.
    assert (got - expected).norm() / expected.norm() < 3 * 2**-9


def test_layers_left_in_bf16(tmp_path):
    model = tiny_models.make("qwen3_moe")
    model.save_pretrained(tmp_path)
    compress(tmp_path, ignore=("lm_head", "re:.*gate$", "re:.*layers.0.*"))
    opened = checkpoint.open(tmp_path)
    assert [opened.layer(i).dtype for i in opened.layers] == ["bf16", "int8"]
    assert torch.equal(opened.layer(0).expert(2).w2, model.model.layers[0].mlp.experts.down_proj[2])


def test_demo_twin_is_what_compressed_tensors_writes(tmp_path):
    ours, theirs = demo.make_checkpoint(tmp_path / "a", "int8"), demo.make_checkpoint(tmp_path / "b", "bf16")
    compress(theirs)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (ours, theirs)]
    assert configs[1]["quantization_config"].items() >= configs[0]["quantization_config"].items()
    got, expected = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert {n: (t.dtype, t.shape) for n, t in got.items()} == {n: (t.dtype, t.shape) for n, t in expected.items()}
    for name in (name for name in got if name.endswith("_scale")):
        assert torch.equal(got[name], expected[name])
        # The library divides in bf16, so its quotient is off by up to 2^-8 * 127.5 = 0.5: one step after rounding.
        weight = name.removesuffix("_scale")
        assert (got[weight].int() - expected[weight].int()).abs().max() <= 1
    assert demo.make_checkpoint(ours, "int8") == ours  # kept


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "mxfp4"}, "MXFP4 weights are not supported; use a BF16 checkpoint"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8 weights"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ weights"),
        ({"quant_method": "awq", "bits": 4}, "AWQ weights"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "format is 'pack-quantized'",
        ),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "has config_groups is False"),
        ({"weights": {"symmetric": False}}, "weights symmetric is False, expected True"),
        ({"weights": {"strategy": "group", "group_size": 128}}, "weights strategy is 'group', expected 'channel'"),
        ({"weights": {"num_bits": 4}}, "weights num_bits is 4, expected 8"),
        ({"weights": {"type": "float"}}, "weights type is 'float', expected 'int'"),
        ({"input_activations": {"dynamic": False, "strategy": "tensor"}}, "input_activations strategy is 'tensor'"),
        ({"input_activations": None}, "input_activations num_bits is None, expected 8"),
        ({"output_activations": {"num_bits": 8}}, "output_activations is"),
        ({"transform": {"config_groups": {"u": {}}}}, "transform_config is"),
    ],
)
def test_unsupported_quantization_is_refused_by_name(scheme, message, tmp_path):
    tiny_models.make("qwen3_moe").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if "quant_method" not in scheme:
        group = demo.QUANTIZATION["config_groups"]["group_0"]
        merged = {k: {**(group[k] or {}), **v} if v else v for k, v in scheme.items() if k in group}
        transform = {"transform_config": scheme.get("transform", {})}
        scheme = {**demo.QUANTIZATION, **transform, "config_groups": {"group_0": {**group, **merged}}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.open(tmp_path)
