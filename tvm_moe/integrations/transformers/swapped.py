"""Classes that transformers does not let other implementations run: in an instance, a subclass of ours takes their place.

So copies and pickles of a model have it, too. Each such class has a file here with

- ``ORIGINAL`` and ``PACKED``: the class whose forward is known, and ours;
- ``experts_of(module)``: the module with the weights, ``read(module)``: how to pack them, or why not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from . import recipe
from .recipe import Recipe

FILES = {
    "transformers.models.llama4.modeling_llama4": "llama4",
    "transformers.models.step3p7.modeling_step3p7": "step3p7",
}


def loaded() -> Iterator[Any]:
    """The files whose model can be here: importing any other would import the whole model."""
    for model, name in FILES.items():
        if model in sys.modules:
            yield importlib.import_module(f".{name}", __package__)


def handler(module: nn.Module) -> Any:
    """The file for ``module``, or None. A subclass, or an instance with a forward of its own, is not what is known."""
    return next((f for f in loaded() if type(module) is f.ORIGINAL and "forward" not in vars(module)), None)


def read(module: nn.Module) -> Recipe | str:
    """How to pack any module, or the reason why it cannot be packed."""
    return (handler(module) or recipe).read(module)


def swap(module: nn.Module) -> None:
    """After its experts have been packed."""
    module.__class__ = handler(module).PACKED


def swap_back(model: nn.Module) -> None:
    """Everywhere in a model whose experts have their weights again."""
    for file in loaded():
        for module in model.modules():
            if type(module) is file.PACKED:
                module.__class__ = file.ORIGINAL
