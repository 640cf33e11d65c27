"""Packed layers as named tensors and a description that says which kernel reads them: safetensors files, `torch.library`.

A file is mapped back without repacking.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from . import activations, kernels
from .activations import ActivationSpec
from .errors import ModuleError, MoEError
from .kernels import MicroKernel
from .packing import shapes
from .plan import LayerSizes
from .runtime import ARRAYS, FORMAT, Layer


def write(layer: Layer, path: Path) -> None:
    """Whole or not at all, even over the file the layer is mapped from."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise MoEError(f"cannot save to {path}: it exists and is no regular file; give another path")
    if not path.parent.is_dir():
        raise MoEError(f"cannot save to {path}: there is no folder {path.parent}; make it first")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".save-") as work:
        made = Path(work, "packed")
        save_file(dict(layer.arrays), str(made), metadata=json.loads(layer.description))
        made.chmod(0o644)
        made.replace(path)


def read(path: Path) -> Layer:
    """The layer of a packed file, its tensors memory-mapped; a ModuleError names what is wrong with the file."""
    if not path.is_file():
        raise ModuleError(f"no packed experts file {path}")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, ValueError) as error:
        raise damaged(path, error) from error
    return assemble(meta, tensors, path)


def damaged(where: object, error: Exception) -> ModuleError:
    return ModuleError(f"{where} is damaged or foreign ({error}); save it again")


def assemble(description: dict[str, str], tensors: dict[str, torch.Tensor], where: object) -> Layer:
    """The layer of `Layer.description` and its tensors; a ModuleError says what is wrong with ``where`` they come from."""
    if description.get("format") != FORMAT:
        raise ModuleError(
            f"{where} is no packed experts file: format {description.get('format')!r}, expected {FORMAT!r}"
        )
    try:
        return parse(description, tensors, where)
    except ModuleError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(where, error) from error


def parse(meta: dict[str, str], tensors: dict[str, torch.Tensor], path: object) -> Layer:
    sizes = LayerSizes(**json.loads(meta["sizes"]))
    name, alpha, limit = json.loads(meta["activation"])
    spec = activation(name, float(alpha), float(limit))
    check_sizes(sizes, spec)
    kernel = kernels.by_name(meta.get("kernel", ""))
    if kernel is None:
        raise ModuleError(
            f"{path} was packed for {meta.get('kernel')!r}, which this version does not have; save it again"
        )
    check_tensors(path, kernel, sizes, tensors)
    return Layer(kernel, sizes, spec, tensors)


def activation(name: str, alpha: float, limit: float) -> ActivationSpec:
    """The activation as `write` recorded it, resolved anew: alpha 1 and an infinite limit stand for none."""
    if name == activations.LINEAR.name:
        return activations.NONE
    kind = activations.ACTIVATIONS[name]
    return activations.resolve(
        name, alpha if kind.takes_alpha else None, None if math.isinf(limit) and limit > 0 else limit
    )


def check_sizes(sizes: LayerSizes, spec: ActivationSpec) -> None:
    """The kernels trust the sizes: their types must be exact, and the gate that of the activation."""
    for name, value in asdict(sizes).items():
        wanted = bool if name in ("gated", "bias13", "bias2", "linear") else int
        if type(value) is not wanted or (wanted is int and value < 1):
            raise ValueError(f"{name} is {value!r}, expected {'true or false' if wanted is bool else 'a whole number'}")
    if sizes.gated != spec.gated:
        raise ValueError(f"gated is {sizes.gated}, activation {spec.name} says {spec.gated}")
    if sizes.linear != (spec is activations.NONE):
        raise ValueError(f"linear is {sizes.linear}, activation is {spec.name}")


def check_tensors(path: object, kernel: MicroKernel, sizes: LayerSizes, tensors: dict[str, torch.Tensor]) -> None:
    """Shapes of a packed file must be those its metadata implies: the kernels trust them."""
    expected = shapes(kernel, sizes)
    for name in ARRAYS:
        got = tuple(tensors[name].shape) if name in tensors else None
        if got != expected[name][0] or tensors[name].dtype != expected[name][1]:
            raise ModuleError(f"{path}: tensor {name} is {got}, expected {expected[name]}; save it again")
