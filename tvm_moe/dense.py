"""What is dense in a MoE block, as torch modules: the router's linear layer and the shared experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class SharedExpert(nn.Module):
    """``(act(x @ gate.T) * (x @ up.T)) @ down.T``, times ``sigmoid(x @ weigher.T)`` where there is one (Qwen2-MoE).

    gate, up: [I, H]; down: [H, I]; weigher: [1, H]; all of one dtype.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    weigher: Tensor | None

    def __init__(
        self, gate: Tensor, up: Tensor, down: Tensor, activation: str = "silu", weigher: Tensor | None = None
    ) -> None:
        super().__init__()
        for name, weight in (("gate", gate), ("up", up), ("down", down), ("weigher", weigher)):
            self.register_buffer(name, weight)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.gate), functional.linear(x, self.up)
        y = functional.linear(GATES[self.activation](gate) * up, self.down)
        return y if self.weigher is None else y * torch.sigmoid(functional.linear(x, self.weigher))


class Router(nn.Module):
    """Logits [T, E] in f32 of hidden states [T, H] in any float dtype.

    weight: [E, H]; bias: [E]; scale: [H], of rms_norm(x) * scale * H**-0.5 in place of x (Gemma 4).
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, eps: float = 1e-6
    ) -> None:
        super().__init__()
        for name, tensor in (("weight", weight), ("bias", bias), ("scale", scale)):
            self.register_buffer(name, tensor)
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        if self.scale is not None:
            x = functional.rms_norm(x, x.shape[-1:], eps=self.eps) * self.scale.float() * x.shape[-1] ** -0.5
        return functional.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())
