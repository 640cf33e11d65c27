"""PackedExperts: a layer's weights in the layout of the kernel that will read them, made expert by expert."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import activations, isa, packed_file
from .activations import ActivationSpec
from .errors import ModuleError, MoEError
from .expert_weights import dtype_name
from .kernels import MicroKernel
from .packing import ExpertWeights, Packer, repack
from .runtime import FORMAT, Layer
from .threads import fork_safe


class PackedExperts:
    """The experts of one layer, packed for one ISA level and dtype; immutable. Made by `pack_experts` or `load`."""

    __slots__ = ("layer",)
    layer: Layer

    def __init__(self, layer: Layer) -> None:
        object.__setattr__(self, "layer", layer)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"PackedExperts is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"PackedExperts is immutable: cannot delete {name}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedExperts:
        return self  # immutable, as a tuple of numbers is

    def __copy__(self) -> PackedExperts:
        return self

    def __reduce__(self) -> Any:
        raise MoEError("PackedExperts cannot be pickled: they are packed for this CPU; use save(path) and load(path)")

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
    def input_size(self) -> int:
        """Columns of hidden_states: hidden_size, but what `pack_linear` made takes the intermediate itself."""
        return self.layer.sizes.input

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
        return sum(t.numel() * t.element_size() for t in self.layer.arrays.values())

    def __repr__(self) -> str:
        return (
            f"PackedExperts(num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, dtype={self.dtype!r}, activation={self.activation!r}, "
            f"isa={self.isa!r}, {self.nbytes / 2**20:.1f} MiB)"
        )

    @classmethod
    @fork_safe
    @torch.inference_mode(False)  # weights outlive whatever mode they are packed in
    def from_experts(
        cls,
        experts: Iterable[ExpertWeights],
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: str,
        activation: str | ActivationSpec = "silu",
        alpha: float | None = None,
        limit: float | None = None,
        interleaved: bool = False,
        isa: str | None = None,
        progress: Callable[[int], None] | None = None,
        batch: int = 1,
    ) -> PackedExperts:
        """Pack experts as they come: memory is the packed layer and ``batch`` experts. ``progress(e)`` after each.

        ``batch`` experts are packed at a time; their tensors must stay as they are meanwhile.
        """
        spec = activations.resolve(activation, alpha, limit) if isinstance(activation, str) else activation
        packer = Packer(
            str(dtype_name(dtype)), num_experts, hidden_size, intermediate_size, spec, interleaved, isa, batch=batch
        )
        for e, expert in enumerate(experts):
            packer.add(e, expert)
            if progress is not None:
                progress(e)
        return cls(packer.finish())

    def save(self, path: str | Path) -> None:
        """Write a safetensors file that `load` maps back without repacking; whole or not at all, even over itself."""
        packed_file.write(self.layer, Path(path))

    @classmethod
    @fork_safe
    def load(cls, path: str | Path, isa: str | None = None) -> PackedExperts:
        """Map a file that `save` wrote. Packed for a level this CPU cannot execute (or other than ``isa``): repacked."""
        layer = packed_file.read(Path(path))
        wanted = isa_choice(layer.kernel, isa)
        return cls(layer if wanted is layer.kernel else repack(layer, wanted))


def isa_choice(packed_for: MicroKernel, level: str | None) -> MicroKernel:
    """The row that will read a packed file: the one it was packed for where this CPU executes it and the cap allows it."""
    if level is not None:
        return isa.choose(packed_for.dtype, level).kernel
    choice = isa.choose(packed_for.dtype)
    return packed_for if packed_for in choice.allowed else choice.kernel


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
