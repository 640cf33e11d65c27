"""PackedExperts: a layer's weights in the layout of the kernel that will read them, made expert by expert."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from . import activations, isa, kernels
from .activations import ActivationSpec
from .errors import ModuleError, MoEError
from .kernels import MicroKernel
from .plan import LayerSizes
from .runtime import ARRAYS, Layer

Tensor = torch.Tensor
FORMAT = "tvm_moe packed experts 1"


@dataclass(frozen=True)
class ExpertWeights:
    """One expert as stored: w13 [2I, H] ([I, H] without gate), w2 [H, I], any strides; scales and biases [N] or None."""

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


class PackedExperts:
    """The experts of one layer, packed for one ISA level and dtype; immutable. Made by `pack_experts` or `load`."""

    __slots__ = ("_tensors", "layer")
    layer: Layer
    _tensors: dict[str, Tensor]

    def __init__(self, kernel: MicroKernel, sizes: LayerSizes, activation: ActivationSpec, tensors: dict[str, Tensor]):
        object.__setattr__(self, "_tensors", tensors)
        object.__setattr__(self, "layer", Layer(kernel, sizes, activation, tensors))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"PackedExperts is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"PackedExperts is immutable: cannot delete {name}")

    @property
    def num_experts(self) -> int:
        return self.layer.sizes.experts

    @property
    def hidden_size(self) -> int:
        return self.layer.sizes.hidden

    @property
    def intermediate_size(self) -> int:
        return self.layer.sizes.intermediate

    @property
    def dtype(self) -> str:
        """ "int8" or "bf16"."""
        return self.layer.kernel.dtype

    @property
    def activation(self) -> str:
        return self.layer.activation.name

    @property
    def isa(self) -> str:
        return self.layer.kernel.isa

    @property
    def nbytes(self) -> int:
        """Bytes of all packed tensors, scales and biases included."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def __repr__(self) -> str:
        return (
            f"PackedExperts(num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, dtype={self.dtype!r}, activation={self.activation!r}, "
            f"isa={self.isa!r}, {self.nbytes / 2**20:.1f} MiB)"
        )

    @classmethod
    def from_experts(
        cls,
        experts: Iterable[ExpertWeights],
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: str,
        activation: str = "silu",
        alpha: float | None = None,
        limit: float | None = None,
        interleaved: bool = False,
        isa: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> PackedExperts:
        """Pack experts one at a time as they come: memory is the packed layer and one expert. ``progress(e)`` after each."""
        from .packing import Packer

        spec = activations.resolve(activation, alpha, limit)
        packer = Packer(dtype, num_experts, hidden_size, intermediate_size, spec, interleaved, isa)
        for e, expert in enumerate(experts):
            packer.add(e, expert)
            if progress is not None:
                progress(e)
        return packer.finish()

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `load` maps back without repacking; whole or not at all, even over itself."""
        meta = {
            "format": FORMAT,
            "kernel": self.layer.kernel.name,
            "sizes": json.dumps(asdict(self.layer.sizes)),
            "activation": json.dumps([self.activation, self.layer.activation.alpha, str(self.layer.activation.limit)]),
        }
        path = Path(path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".save-") as work:
            made = Path(work, "packed")
            save_file(dict(self._tensors), str(made), metadata=meta)
            made.replace(path)

    @classmethod
    def load(cls, path: str | Path, isa: str | None = None) -> PackedExperts:
        """Map a file that `save` wrote. Packed for a level this CPU cannot execute (or other than ``isa``): repacked."""
        from .packing import repack

        packed = cls(*read_packed(Path(path)))
        choice = isa_choice(packed.layer.kernel, isa)
        return packed if choice is packed.layer.kernel else repack(packed, choice)


def isa_choice(packed_for: MicroKernel, level: str | None) -> MicroKernel:
    """The row that will read a packed file: the one it was packed for where this CPU executes it."""
    if level is not None:
        return isa.choose(packed_for.dtype, level).kernel
    return packed_for if isa.executable(packed_for)[0] else isa.choose(packed_for.dtype).kernel


def read_packed(path: Path) -> tuple[MicroKernel, LayerSizes, ActivationSpec, dict[str, Tensor]]:
    """Metadata and memory-mapped tensors of a packed file; a ModuleError names what is wrong with it."""
    if not path.is_file():
        raise ModuleError(f"no packed experts file {path}")
    try:
        return parse_packed(path)
    except MoEError:
        raise
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ModuleError(f"{path} is damaged or foreign ({error}); save it again") from error


def parse_packed(path: Path) -> tuple[MicroKernel, LayerSizes, ActivationSpec, dict[str, Tensor]]:
    with safetensors.safe_open(str(path), framework="pt") as file:
        meta = file.metadata() or {}
        if meta.get("format") != FORMAT:
            raise ModuleError(f"{path} is no packed experts file: format {meta.get('format')!r}, expected {FORMAT!r}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    sizes = LayerSizes(**json.loads(meta["sizes"]))
    name, alpha, limit = json.loads(meta["activation"])
    spec = ActivationSpec(activations.ACTIVATIONS[name], float(alpha), float(limit))
    kernel = kernels.by_name(meta.get("kernel", ""))
    if kernel is None:
        raise ModuleError(
            f"{path} was packed for {meta.get('kernel')!r}, which this version does not have; save it again"
        )
    check_tensors(path, kernel, sizes, tensors)
    return kernel, sizes, spec, tensors


def check_tensors(path: Path, kernel: MicroKernel, sizes: LayerSizes, tensors: dict[str, Tensor]) -> None:
    """Shapes of a packed file must be those its metadata implies: the kernels trust them."""
    from .packing import shapes

    expected = shapes(kernel, sizes)
    for name in ARRAYS:
        got = tuple(tensors[name].shape) if name in tensors else None
        if got != expected[name][0] or tensors[name].dtype != expected[name][1]:
            raise ModuleError(f"{path}: tensor {name} is {got}, expected {expected[name]}; save it again")


def save_model(folder: str | Path, layers: dict[int, PackedExperts]) -> None:
    """Write the packed layers of a model into ``folder``, a file a layer, and an index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {str(i): f"layer-{i:05d}.safetensors" for i in layers}
    for i, packed in layers.items():
        packed.save(folder / names[str(i)])
    (folder / "packed.json").write_text(json.dumps({"format": FORMAT, "layers": names}, indent=1))


def load_model(folder: str | Path, isa: str | None = None) -> Iterator[tuple[int, PackedExperts]]:
    """(layer index, packed experts) of a folder that `save_model` wrote, mapped one by one."""
    index = Path(folder) / "packed.json"
    try:
        files = {int(i): Path(folder) / name for i, name in json.loads(index.read_text())["layers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModuleError(f"{index}: no readable index of packed layers ({error}); write it with save_model") from error
    for i, file in files.items():
        yield i, PackedExperts.load(file, isa)


__all__ = ["ExpertWeights", "PackedExperts", "load_model", "save_model"]
