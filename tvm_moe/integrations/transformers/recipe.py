"""How to pack an experts module of transformers: its weights, found by its attributes, and its activation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from ... import api
from ...experts import PackedExperts
from .. import torchao
from .activation import recognise

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Packed = PackedExperts | tuple[PackedExperts, PackedExperts]  # a layer, or its two products where it is not fused


@dataclass(frozen=True)
class Recipe:
    """Views of a module's weights, w13 [E, 2I, H] and w2 [E, H, I], biases and scales [E, N], and its activation.

    They are stored [E, K, N] where ``transposed``. ``activation`` holds keyword arguments of `pack_experts`; None: its own
    function runs between two products, and ``reason`` says why.
    """

    w13: Tensor
    w2: Tensor
    vectors: dict[str, Any]
    transposed: bool
    activation: dict[str, Any] | None
    reason: str = ""

    def pack(self, dtype: str | None = None, isa: str | None = None) -> Packed:
        """The layer, or its two products where it is not fused."""
        if self.activation is not None:
            return api.pack_experts(self.w13, self.w2, **self.vectors, **self.activation, dtype=dtype, isa=isa)
        parts = {"w13": self.w13, "w2": self.w2}
        first, second = (
            api.pack_linear(w, scale=self.vectors[f"{n}_scale"], bias=self.vectors[f"{n}_bias"], dtype=dtype, isa=isa)
            for n, w in parts.items()
        )
        return first, second


def dispatched(module: nn.Module) -> bool:
    """Whether transformers lets other implementations run it: its class has `use_experts_implementation`.

    Then its attributes say all about it. A subclass or instance that brings its own forward does not ask for ours.
    """
    forward = getattr(module.forward, "__func__", None)
    return getattr(forward, "__globals__", {}).get("__name__") == moe.__name__


def read(module: Any) -> Recipe | str:
    """How to pack an experts module, or the reason why it cannot be packed."""
    if "forward" in vars(module):
        return "its forward has been replaced, by hooks or for expert parallelism"
    if not dispatched(module):
        return f"{type(module).__name__} does not ask for other implementations (use_experts_implementation)"
    first = "gate_up_proj" if module.has_gate else "up_proj"
    apply = module._apply_gate if module.has_gate else module.act_fn
    made = recipe(module, first, apply, module.is_transposed, module.has_bias)
    if isinstance(made, Recipe) and module.has_post_expert_norm:
        return replace(made, activation=None, reason="it normalizes every expert's output")
    return made


def recipe(module: Any, first: str, apply: Any, transposed: bool, bias: bool) -> Recipe | str:
    """Of weights called ``first`` and down_proj, and an activation ``apply``."""
    matrices: list[Tensor] = []
    vectors: dict[str, Tensor | None] = {}
    for name, ours in ((first, "w13"), ("down_proj", "w2")):
        found = matrix(module, name, transposed)
        if isinstance(found, str):
            return found
        matrices.append(found[0])
        vectors |= {f"{ours}_scale": found[1], f"{ours}_bias": getattr(module, f"{name}_bias") if bias else None}
    w13, w2 = matrices
    if not (w13.numel() and w2.numel()):
        return f"its weights are empty: {tuple(w13.shape)} and {tuple(w2.shape)}"
    E, count = len(w13), getattr(module, "num_experts", len(w13))
    if count != E:
        return f"it has weights of {E} experts and says num_experts = {count}"
    activation = recognise(apply, module, w2.shape[2], first == "gate_up_proj")
    if isinstance(activation, str):
        return Recipe(w13, w2, vectors, transposed, None, activation)
    return Recipe(w13, w2, vectors, transposed, activation)


def fused(made: Recipe | str) -> Recipe | str:
    """For modules that could not call their own activation in between: the reason instead of what is not fused."""
    return made.reason if isinstance(made, Recipe) and made.reason else made


def matrix(module: nn.Module, name: str, transposed: bool) -> tuple[Tensor, Tensor | None] | str:
    """[E, N, K] and, where it is int8 (torchao's Int8Tensor), scales [E, N, 1]; or what is the matter with it."""
    w = module._parameters.get(name)
    if w is None:
        return f"it has no parameter {name}"
    if w.device.type != "cpu":
        return f"its weights are on {w.device}: load or move the model to the CPU first"
    if torchao.is_quantized(w):
        along_inputs = (
            f"{name} is quantized along its columns, which are the inputs: only scales per output channel are supported"
        )
        return along_inputs if transposed else torchao.parts(w, name)
    if type(w.data) is not Tensor or w.dtype not in FLOATS or w.ndim != 3:
        return f"{name} is {type(w.data).__name__} {w.dtype} {tuple(w.shape)}, expected three dimensions of bf16, f16 or f32"
    return (w.transpose(1, 2) if transposed else w), None
