"""`prepare_`: every MoE layer of a transformers model packed in place, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from ... import isa as levels
from ... import layers, threads
from ...errors import MoEError
from ...expert_weights import dtype_name
from ...experts import PackedExperts
from . import experts, report, swapped
from .experts import PACKED, WEIGHTS
from .recipe import Packed, Recipe, dispatched
from .report import PackedLayer, Report
from .restore import unprepare_


@torch.inference_mode(False)  # or what is made could never be written to
def prepare_(model: nn.Module, dtype: str | None = None, *, isa: str | None = None, progress: bool = True) -> Report:
    """Pack the experts of every MoE layer and free their original weights; the model then generates as before, but faster.

    The model is changed in place and is for inference from then on. Memory never exceeds the model and one packed layer.
    Layers that cannot be packed are left as they are, and the report says why.

    Args:
        dtype: None keeps what is there (floating weights run in BF16, torchao's Int8Tensor in INT8 with its scales);
            "int8" quantizes: weights per channel, activations per token at run time.
        isa: CPU level, as for `pack_experts`.
        progress: show a progress bar on stderr where that is a terminal.

    Raises:
        MoEError: no module, or a dtype that does not exist; UnsupportedISAError: a level this CPU lacks. Nothing has
            been changed then.
    """
    if not isinstance(model, nn.Module):
        raise MoEError(f"prepare_ takes a transformers model, got {type(model).__name__}")
    kind = None if dtype is None else dtype_name(dtype)
    if kind not in (None, "bf16", "int8"):
        raise MoEError(f"dtype={dtype!r} is not supported; expected None, 'bf16' or 'int8'")
    dtype = cast("str | None", kind)
    levels.choose(dtype or "bf16", isa)
    refuse_others(model, dtype)
    experts.enable()
    found, shared = list(find(model)), shared_parameters(model)
    made = Report(before=report.memory(model))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        for name, module in bar.track(found, description="packing experts"):
            prepare_layer(name or type(module).__name__, module, dtype, isa, shared, made)
    made.after = report.memory(model)
    announce(made)
    return made


def refuse_others(model: nn.Module, dtype: str | None) -> None:
    """What was packed before stays as it is; an error where something else is asked for now."""
    for name, module in model.named_modules():
        if isinstance(module, layers.Experts) and dtype not in (None, module.packed.dtype):
            raise MoEError(
                f"{name} was packed as {module.packed.dtype} before and cannot become {dtype}; load the model again, or call "
                f"unprepare_(model) first where it was packed from bf16 weights to bf16"
            )


def find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Experts modules, also those that nobody knows how to pack, and whole blocks of Llama 4; under the experts' names."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if (how := swapped.handler(module)) is not None:
            inner = how.experts_of(module)
            inside.add(inner)
            yield name if inner is module else f"{name}.experts", module
        elif module not in inside and is_candidate(name, module):
            yield name, module


def is_candidate(name: str, module: nn.Module) -> bool:
    """Experts of transformers, packed or not, and whatever else is called so."""
    called = name.rpartition(".")[2] == "experts" and not isinstance(module, layers.Experts)
    return dispatched(module) or hasattr(module, PACKED) or called


def shared_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that more than one module holds."""
    count = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {key for key, n in count.items() if n > 1}


def prepare_layer(name: str, module: Any, dtype: str | None, isa: str | None, shared: set[int], made: Report) -> None:
    """One layer of `find`, entered into the report; nothing holds its weights afterwards."""
    if hasattr(module, PACKED):
        made.already.append(name)
        return
    how = swapped.handler(module)
    owner = module if how is None else how.experts_of(module)
    weights = [p for key in WEIGHTS if (p := owner._parameters.get(key)) is not None]
    shares = bool(shared & set(map(id, weights)))
    recipe = "its weights are shared with another module" if shares else swapped.read(module)
    if isinstance(recipe, str):
        made.left.append((name, recipe))
        return
    try:
        packed = recipe.pack(dtype, isa)
    except MoEError as error:  # of this layer's weights, for the arguments have been checked: NaN, a size out of range
        made.left.append((name, str(error)))
        return
    before = sum(map(report.size, weights))
    experts.install(owner, packed, recipe)
    if how is not None:
        swapped.swap(module)
    made.packed.append(described(name, recipe, packed, before))


def described(name: str, recipe: Recipe, packed: Packed, before: int) -> PackedLayer:
    parts = (packed,) if isinstance(packed, PackedExperts) else packed
    activation = report.activation(parts[0]) if len(parts) == 1 else "its own activation"
    after = sum(part.nbytes for part in parts)
    return PackedLayer(name, parts[0].dtype, activation, parts[0].isa, before, after, recipe.reason)


def announce(made: Report) -> None:
    """Slow paths, once per process and reason."""
    for reason in sorted({layer.not_fused for layer in made.packed} - {""}):
        threads.say(f"experts are not fused: {reason}")
    for reason in sorted({reason for _, reason in made.left}):
        threads.say(f"experts are left to transformers: {reason}")
    if not (made.packed or made.already or made.left):
        threads.say("prepare_ found no experts in this model: nothing is faster")


__all__ = ["prepare_", "unprepare_"]
