"""The demo checkpoints: a small but real Qwen3-MoE model, in BF16 and in compressed-tensors INT8.

``python -m tvm_moe.demo FOLDER`` makes both, once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .errors import MoEError

# Weights of 1/sqrt(H) keep activations at the scale of their input; I = 352 is a tensor-parallel half of Gemma 4's 704.
SIZES = {
    "hidden_size": 512,
    "moe_intermediate_size": 352,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1408,
    "vocab_size": 1024,
    "norm_topk_prob": True,
    "initializer_range": 512**-0.5,
}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
}


def make_checkpoint(path: str | Path, dtype: str = "bf16") -> Path:
    """Writes the "bf16" or the "int8" checkpoint to the folder ``path``, or keeps the one that is there."""
    folder = Path(path)
    if dtype not in ("bf16", "int8"):
        raise MoEError(f"dtype of a demo checkpoint is {dtype!r}, expected 'bf16' or 'int8'")
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place when complete: what is at `path` is never half a checkpoint.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        _model().save_pretrained(made)
        if dtype == "int8":
            _quantize(made)
        os.replace(made, folder)
    return folder


def _model() -> Any:
    try:
        import transformers
    except ImportError:
        raise MoEError("demo checkpoints are made by transformers: pip install 'tvm_moe[hf]'") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**SIZES, dtype="bfloat16")
        return transformers.AutoModelForCausalLM.from_config(config)


def _quantize(folder: Path) -> None:
    """Every linear layer but the routers and lm_head, per output channel, in the layout of compressed-tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale"] = quantize_channels(tensors[name])
    save_file(tensors, folder / "int8.safetensors", metadata={"format": "pt"})
    os.replace(folder / "int8.safetensors", file)
    config = json.loads((folder / "config.json").read_text())
    ignore = ["lm_head", *(name.removesuffix(".weight") for name in tensors if name.endswith(".mlp.gate.weight"))]
    config["quantization_config"] = {**QUANTIZATION, "ignore": ignore}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 ``[N, K]``, scale ``[N, 1]`` in the dtype of ``weight``), with the scale of compressed-tensors: the range
    -128 to 127 is 255 steps wide, so absmax / 127.5; what rounding the scale leaves outside saturates."""
    scale = (weight.float().abs().amax(1, keepdim=True).clamp(min=1e-7) / 127.5).to(weight.dtype)
    return (weight.float() / scale.float()).round().clamp(-128, 127).to(torch.int8), scale


if __name__ == "__main__":
    for kind in ("bf16", "int8"):
        print(make_checkpoint(Path(sys.argv[1]) / kind, kind))
