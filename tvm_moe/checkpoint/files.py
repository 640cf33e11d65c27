"""Tensors of a safetensors checkpoint by name, from one file or many, each checked before it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("BF16", "F16", "F32")
_AGAIN = "download or convert the checkpoint again"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); {_AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}; {_AGAIN}")
    return value


def scan(folder: Path) -> dict[str, Path]:
    """The file of every tensor. Reads headers only, and finds absent shards and truncated files."""
    if (folder / SINGLE).exists():
        return dict.fromkeys(_open(folder / SINGLE).keys(), folder / SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: has no weight_map; {_AGAIN}")
    names: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        names.setdefault(shard, set()).add(name)
    for shard in sorted(names):
        _check_shard(folder, shard, names[shard])
    return {name: folder / shard for name, shard in weight_map.items()}


def _check_shard(folder: Path, shard: str, names: set[str]) -> None:
    path = folder / shard
    if Path(shard).name != shard or not path.is_file():
        raise CheckpointError(f"{folder / INDEX}: names the shard {shard!r}, which is not in {folder}; {_AGAIN}")
    absent = names.difference(_open(path).keys())
    if absent:
        raise CheckpointError(f"{path}: tensor {min(absent)!r} is missing, though {INDEX} puts it there; {_AGAIN}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error}); {_AGAIN}") from None


class TensorFiles:
    """Reads checked tensors as views of mapped files (never write to them); unmapped when this and they are gone."""

    def __init__(self, folder: Path, files: dict[str, Path]):
        self.folder = folder
        self._files = files
        self._handles: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def dtype(self, name: str) -> str:
        """The stored dtype as safetensors spells it: "BF16", "I8", ..."""
        return str(self._slice(name).get_dtype())

    def read(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS, row: int | None = None
    ) -> torch.Tensor:
        """The tensor, or its ``row``; CheckpointError unless it is there with this full shape and one of ``dtypes``."""
        part = self._slice(name)
        for what, got, good in (
            ("shape", tuple(part.get_shape()), (shape,)),
            ("dtype", str(part.get_dtype()), dtypes),
        ):
            if got not in good:
                expected = " or ".join(map(str, good))
                message = f"tensor {name!r} has {what} {got}, expected {expected}"
                raise CheckpointError(f"{self._files[name]}: {message}; does config.json belong to these weights?")
        return part[:] if row is None else part[row]

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing; {_AGAIN}")
        path = self._files[name]
        if path not in self._handles:
            self._handles[path] = _open(path)
        return self._handles[path].get_slice(name)
