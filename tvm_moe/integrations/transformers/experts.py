"""One experts module of transformers: packed weights put in the place of its own, and its forward with them."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import moe

from ... import threads
from ...errors import MoEError
from ...experts import PackedExperts
from ...layers import Experts
from .recipe import Packed, Recipe, read
from .unfused import Unfused

NAME = "tvm_moe"  # among transformers' experts implementations
PACKED = "tvm_moe_packed"  # submodule of an experts module that holds its packed weights
ORIGINAL = "tvm_moe_original"  # attribute of such a module: what `install` took away
WEIGHTS = tuple(f"{name}{suffix}" for name in ("gate_up_proj", "up_proj", "down_proj") for suffix in ("", "_bias"))
_packing = threading.Lock()


@dataclass(frozen=True)
class Original:
    """The config that chose who runs a module, and shape, dtype and requires_grad of the parameters that were packed.

    ``parameters`` is None where the packed weights came from elsewhere.
    """

    config: Any
    parameters: dict[str, tuple[torch.Size, torch.dtype, bool]] | None = None
    transposed: bool = False
    interleaved: bool = False

    def __reduce__(self) -> Any:
        return revived, (self.config, self.parameters, self.transposed, self.interleaved)


def revived(*fields: Any) -> Original:
    """Of a pickle: a process that loads a packed model must know our name as the one that packed it did."""
    enable()
    return Original(*fields)


def install(module: Any, packed: Packed, recipe: Recipe | None = None) -> None:
    """Put packed weights in place of the module's own, whose memory is freed, and let it run them by `forward`.

    All else stays. The module gets a config of its own that names our implementation: other modules and models that share
    the config are not touched, and switching the implementation of the model does not reach packed weights. ``recipe`` is
    what was packed, where these were the weights of the module: `unprepare_` can put them back.
    """
    enable()
    taken = {name: p for name in WEIGHTS if (p := module._parameters.get(name)) is not None}
    config = getattr(module, "config", None)
    original = Original(config)
    if recipe is not None:
        described = {name: (p.shape, p.dtype, p.requires_grad) for name, p in taken.items()}
        interleaved = bool(recipe.activation and recipe.activation["interleaved"])
        original = Original(config, described, recipe.transposed, interleaved)
    setattr(module, ORIGINAL, original)
    for name in taken:
        delattr(module, name)
    setattr(module, PACKED, Experts(packed) if isinstance(packed, PackedExperts) else Unfused(*packed))
    if config is not None:
        module.config = copy.copy(config)
        module.config._experts_implementation_internal = NAME  # the public setter reaches configs that are shared


def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of [T, H] for ids and weights [T, k], as transformers calls every implementation."""
    packed = self._modules.get(PACKED)
    if packed is None:
        return unprepared(self, hidden_states, top_k_index, top_k_weights)
    if isinstance(packed, Unfused):
        return packed(self, hidden_states, top_k_weights, top_k_index)
    # Not called as a module: that it has no hooks is known, and costs three microseconds to find out between two layers.
    return packed.forward(hidden_states, top_k_weights, top_k_index)


def unprepared(module: Any, *inputs: Tensor) -> Tensor:
    """Pack the module now; one that cannot be packed runs its own eager forward."""
    if torch.compiler.is_compiling():
        raise MoEError("these experts are not packed yet: call tvm_moe.integrations.transformers.prepare_(model) first")
    with _packing:
        how = None if hasattr(module, PACKED) else read(module)
        if isinstance(how, Recipe):
            threads.say("experts are packed when they first run: call prepare_(model) to do it once, before")
            install(module, how.pack(), how)
    if isinstance(how, str):
        threads.say(f"experts run by transformers' eager implementation: {how}")
        return type(module).forward.__wrapped__(module, *inputs)
    if how is not None and how.activation is None:
        threads.say(f"experts are not fused: {how.reason}")
    return forward(module, *inputs)


def enable() -> None:
    """Register "tvm_moe" as an experts implementation of transformers; calling it again changes nothing.

    From then on saving a model that holds packed experts is an error: save_pretrained would write weights that no model
    can load.
    """
    moe.ExpertsInterface.register(NAME, forward)
    original = PreTrainedModel.save_pretrained
    if getattr(original, NAME, False):
        return

    @wraps(original)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if names := [name for name, module in self.named_modules() if hasattr(module, PACKED)]:
            raise MoEError(
                f"{len(names)} MoE layers of this model are packed ({names[0]}, ...), which transformers cannot save: call "
                f"unprepare_(model) first where it was packed from bf16 weights to bf16, or save before prepare_"
            )
        return original(self, *args, **kwargs)

    setattr(save_pretrained, NAME, True)
    cast(Any, PreTrainedModel).save_pretrained = save_pretrained


__all__ = ["NAME", "PACKED", "Original", "Recipe", "enable", "forward", "install", "read"]
