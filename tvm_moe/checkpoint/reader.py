"""Opening a checkpoint: its config, its format, its MoE layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MoEError
from .files import TensorFiles, read_json, scan
from .formats import FORMATS, LAYER_PREFIXES, Config, moe_layers, number
from .layer import LayerReader
from .quantization import is_quantized
from .tensors import LayerTensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder; reads nothing but names until a layer is asked for."""

    path: Path
    config: dict[str, Any]
    model_type: str
    layers: list[int]  # those with experts
    _files: dict[str, Path]
    _quantized: bool

    def layer(self, index: int) -> LayerReader:
        """MoE layer ``index``; its files stay mapped only as long as the reader and its tensors live."""
        if index not in self.layers:
            raise CheckpointError(f"{self.path}: layer {index} has no experts; those that have: {self.layers}")
        row = FORMATS[self.model_type]
        prefix = f"{_prefix(self._files, index, self.path)}.{index}.{row.block}"
        tensors = LayerTensors(TensorFiles(self.path, self._files), prefix)
        return LayerReader(tensors, index, text_config(self.config), row, self._quantized)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a folder with config.json and safetensors; CheckpointError says what is missing, damaged or unsupported."""
    folder = Path(path)
    if not folder.is_dir():
        hint = "give its folder" if folder.exists() else "download it first and give its folder"
        raise CheckpointError(f"{folder}: no such checkpoint folder; {hint}")
    try:
        return _read(folder)
    except MoEError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: config.json or the index holds a value of an unexpected kind ({error}); download it again"
        ) from error


def _read(folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    text = text_config(config)
    model_type = text.get("model_type") or config.get("model_type")
    if model_type not in FORMATS:
        raise CheckpointError(f"{folder}: model_type {model_type!r} is not supported; expected one of {list(FORMATS)}")
    quantized = is_quantized(config, str(folder / "config.json"))
    _check(text, model_type, folder)
    return Checkpoint(folder, config, model_type, moe_layers(text), scan(folder), quantized)


def text_config(config: Config) -> Config:
    """The language model's part of the config of a multimodal model; the whole of any other."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _check(config: Config, model_type: str, folder: Path) -> None:
    number(config, "num_hidden_layers")
    if not moe_layers(config):
        raise CheckpointError(f"{folder}: config.json describes a dense model; expected one with MoE layers")
    row, method = FORMATS[model_type], config.get("topk_method")
    if config.get("scoring_func") not in (None, row.scoring):
        got = config["scoring_func"]
        raise CheckpointError(f"{folder}: scoring_func {got!r} of {model_type} is not supported, only {row.scoring!r}")
    if method is not None and (method == "noaux_tc") != (row.correction_bias is not None):
        raise CheckpointError(f"{folder}: topk_method {method!r} of {model_type} is not supported")


def _prefix(files: dict[str, Path], index: int, folder: Path) -> str:
    for prefix in LAYER_PREFIXES:
        if any(name.startswith(f"{prefix}.{index}.") for name in files):
            return prefix
    raise CheckpointError(f"{folder}: tensors of layer {index} are missing; download or convert the checkpoint again")
