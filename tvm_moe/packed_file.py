"""Packed layers on disk: a safetensors file whose metadata says which kernel reads it, mapped back without repacking."""

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
from .runtime import ARRAYS, Layer

FORMAT = "tvm_moe packed experts 1"


def write(layer: Layer, path: Path) -> None:
    """Whole or not at all, even over the file the layer is mapped from."""
    spec = layer.activation
    meta = {
        "format": FORMAT,
        "kernel": layer.kernel.name,
        "sizes": json.dumps(asdict(layer.sizes)),
        "activation": json.dumps([spec.name, spec.alpha, str(spec.limit)]),
    }
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise MoEError(f"cannot save to {path}: it exists and is no regular file; give another path")
    if not path.parent.is_dir():
        raise MoEError(f"cannot save to {path}: there is no folder {path.parent}; make it first")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".save-") as work:
        made = Path(work, "packed")
        save_file(dict(layer.arrays), str(made), metadata=meta)
        made.chmod(0o644)
        made.replace(path)


def read(path: Path) -> Layer:
    """The layer of a packed file, its tensors memory-mapped; a ModuleError names what is wrong with the file."""
    if not path.is_file():
        raise ModuleError(f"no packed experts file {path}")
    try:
        return parse(path)
    except ModuleError:
        raise
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModuleError(f"{path} is damaged or foreign ({error}); save it again") from error


def parse(path: Path) -> Layer:
    with safetensors.safe_open(str(path), framework="pt") as file:
        meta = file.metadata() or {}
        if meta.get("format") != FORMAT:
            raise ModuleError(f"{path} is no packed experts file: format {meta.get('format')!r}, expected {FORMAT!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
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
    kind = activations.ACTIVATIONS[name]
    return activations.resolve(
        name, alpha if kind.takes_alpha else None, None if math.isinf(limit) and limit > 0 else limit
    )


def check_sizes(sizes: LayerSizes, spec: ActivationSpec) -> None:
    """The kernels trust the sizes: their types must be exact, and the gate that of the activation."""
    for name, value in asdict(sizes).items():
        wanted = bool if name in ("gated", "bias13", "bias2") else int
        if type(value) is not wanted or (wanted is int and value < 1):
            raise ValueError(f"{name} is {value!r}, expected {'true or false' if wanted is bool else 'a whole number'}")
    if sizes.gated != spec.gated:
        raise ValueError(f"gated is {sizes.gated}, activation {spec.name} says {spec.gated}")


def check_tensors(path: Path, kernel: MicroKernel, sizes: LayerSizes, tensors: dict[str, torch.Tensor]) -> None:
    """Shapes of a packed file must be those its metadata implies: the kernels trust them."""
    expected = shapes(kernel, sizes)
    for name in ARRAYS:
        got = tuple(tensors[name].shape) if name in tensors else None
        if got != expected[name][0] or tensors[name].dtype != expected[name][1]:
            raise ModuleError(f"{path}: tensor {name} is {got}, expected {expected[name]}; save it again")
