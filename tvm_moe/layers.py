"""`torch.nn` modules for people who write their own model: packed experts, and a whole MoE block around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import api, checkpoint, ops, routing
from .dense import Router
from .errors import MoEError
from .experts import PackedExperts
from .runtime import ARRAYS
from .threads import fork_safe


class Experts(nn.Module):
    """`PackedExperts` as a module: its tensors are buffers, so that torch.compile, torch.export and state_dict see them.

    Called as `fused_moe` is: (hidden_states [T, H], topk_weights [T, k], topk_ids [T, k]) -> [T, H]. It stays on the CPU
    in its packed dtype whatever ``.to``, ``.half`` or ``.float`` do to the model around it.
    """

    layout: Tensor

    @torch.inference_mode(False)  # buffers that can be loaded into, whatever mode the module is made in
    def __init__(self, packed: PackedExperts) -> None:
        super().__init__()
        if not isinstance(packed, PackedExperts):
            raise MoEError(f"experts must be PackedExperts (from pack_experts), got {type(packed).__name__}")
        for name in ARRAYS:
            self.register_buffer(name, packed.layer.arrays[name])
        self.description = packed.layer.description
        # Beside the weights in a state_dict: tensors of the same shapes may be packed for another kernel.
        self.register_buffer("layout", torch.tensor(list(self.description.encode()), dtype=torch.uint8, device="cpu"))

    @property
    def packed(self) -> PackedExperts:
        return ops.assembled(self.tensors(), self.description)

    def tensors(self) -> list[Tensor]:
        held = self._buffers  # `getattr` of a module takes a microsecond each
        try:
            return [held[name] for name in ARRAYS]  # type: ignore[misc]
        except KeyError as lost:
            raise MoEError(f"these experts have lost their buffer {lost}; pack the weights again") from None

    def serving(self) -> PackedExperts:
        """`packed`, remembered, and without its arrays."""
        return ops.packed_experts(self.tensors(), self.description)

    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, apply_router_weight_on_input: bool = False
    ) -> Tensor:
        rest = topk_weights, topk_ids, apply_router_weight_on_input
        if not torch.compiler.is_compiling() and not ops.wants_gradient(hidden_states, topk_weights):
            # The operator of a recorded call takes five microseconds more to hand over its arguments.
            served = api.known_call(hidden_states, self.serving(), *rest)
            if served is not None:
                return served
        if not all(isinstance(t, Tensor) for t in (hidden_states, topk_weights, topk_ids)):
            api.check_tensors(
                hidden_states, topk_weights, topk_ids, self.packed.input_size, apply_router_weight_on_input
            )
        return ops.FUSED_MOE(hidden_states, self.tensors(), self.description, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        """Conversions pass by: the kernels read exactly what was packed. Another device is an error."""
        device = fn(torch.empty(0, device="cpu")).device
        if device.type != "cpu":
            raise MoEError(f"packed experts run on the CPU and cannot be moved to {device}; move the rest of the model")
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Weights packed for another kernel, or with other sizes, are an error that says both."""
        given = state_dict.get(f"{prefix}layout")
        if given is not None and bytes(given.tolist()) != self.description.encode():
            raise MoEError(
                f"{prefix}: these experts were packed as {bytes(given.tolist()).decode(errors='replace')}, the module "
                f"holds {self.description}; pack the original weights on this CPU"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return repr(self.packed)


class FusedMoE(nn.Module):
    """A whole MoE block, ``y = experts(x, route(router(x))) + shared(x)``, for hidden states [..., H] of any leading shape.

    Args:
        experts: packed by `pack_experts` or loaded by `PackedExperts.load`.
        router: a module, or a weight [E, H], that gives logits [T, E] of [T, H].
        top_k: experts a token; ``routing``: the other keyword arguments of `route`.
        shared: an optional module that every token passes, [T, H] -> [T, H].
    """

    def __init__(
        self,
        experts: PackedExperts,
        router: nn.Module | Tensor,
        top_k: int,
        *,
        shared: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        experts = getattr(experts, "packed", experts)
        if not isinstance(experts, PackedExperts):
            raise MoEError(f"experts must be PackedExperts (from pack_experts), got {type(experts).__name__}")
        if not isinstance(router, Tensor | nn.Module):
            raise MoEError(f"router must be a module or a weight [E, H], got {type(router).__name__}")
        self.router = Router(router) if isinstance(router, Tensor) else router
        self.experts, self.shared, self.top_k = Experts(experts), shared, top_k
        self.num_experts, self.hidden_size = experts.num_experts, experts.hidden_size
        if isinstance(router, Tensor) and router.shape != (self.num_experts, self.hidden_size):
            expected = (self.num_experts, self.hidden_size)
            raise MoEError(f"router has shape {tuple(router.shape)}, expected [E, H] = {expected}")
        for name in ("correction_bias", "per_expert_scale"):
            self.register_buffer(name, options.pop(name, None))
        self.options = options
        logits = torch.zeros(0, experts.num_experts, device="cpu")
        routing.route(logits, top_k, **self.routing())  # a wrong option is an error here, not in the first call

    def routing(self) -> dict[str, Any]:
        return self.options | {
            "correction_bias": self.correction_bias,
            "per_expert_scale": self.per_expert_scale,
        }

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, layer: int, *, dtype: str | None = None, isa: str | None = None
    ) -> FusedMoE:
        """MoE layer ``layer`` of a checkpoint on disk (`checkpoint.FORMATS`); ``dtype`` "int8" quantizes floating weights."""
        reader = checkpoint.open(path).layer(layer)
        options = reader.routing
        return cls(
            reader.pack(dtype, isa),
            reader.router_module(),
            options.pop("top_k"),
            shared=reader.shared_module() if reader.has_shared_experts else None,
            **options,
        )

    @fork_safe
    def forward(self, hidden_states: Tensor) -> Tensor:
        if not isinstance(hidden_states, Tensor) or hidden_states.ndim == 0:
            raise MoEError(f"hidden_states must be a torch tensor [..., H], got {api.described(hidden_states)}")
        H = hidden_states.shape[-1]
        if self.hidden_size != H:
            raise MoEError(f"hidden_states has {H} columns, this block has hidden size {self.hidden_size}")
        x = hidden_states.flatten(0, -2) if hidden_states.ndim > 1 else hidden_states[None]
        logits = self.router(x)
        if logits.shape[-1] != self.num_experts:
            raise MoEError(
                f"the router gives {logits.shape[-1]} logits a token, this block has {self.num_experts} experts"
            )
        weights, ids = routing.route(logits, self.top_k, **self.routing())
        y = self.experts(x, weights, ids)
        if self.shared is not None:
            y = y + self.shared(x)
        return y.view(hidden_states.shape)
