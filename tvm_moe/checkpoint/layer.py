"""One MoE layer of a checkpoint: its sizes, its experts one at a time, its router and its shared expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import activations
from ..dense import Router, SharedExpert
from ..errors import CheckpointError, MoEError
from ..experts import ExpertWeights, PackedExperts
from .files import FLOATS
from .formats import ACTIVATION, NUM_EXPERTS, TOP_K, Config, Format, groups, number, shared_size
from .tensors import LayerTensors


class LayerReader:
    """Reads one layer on demand and keeps nothing: what is returned is all that is held.

    ``dtype`` is "int8" or "bf16" (which stands for every float dtype); ``options`` are the keyword arguments that
    `pack_experts` and `reference.fused_moe` share.
    """

    def __init__(self, tensors: LayerTensors, index: int, config: Config, row: Format, quantized: bool):
        self.index = index
        self.num_experts = number(config, *NUM_EXPERTS)
        self.top_k = number(config, *TOP_K)
        self.hidden_size = number(config, "hidden_size")
        self.intermediate_size = number(config, row.intermediate)
        self.alpha = config.get(row.alpha) if row.alpha else None
        self.limit = config.get(row.limit) if row.limit else None
        name = row.activation or next((config[key] for key in ACTIVATION if key in config), "silu")
        self.activation = activations.resolve(name, self.alpha, self.limit).name
        self.interleaved = row.interleaved
        self.options = {k: getattr(self, k) for k in ("activation", "alpha", "limit", "interleaved")}
        self.has_shared_experts = row.shared is not None and shared_size(config) > 0
        self._tensors, self._config, self._row = tensors, config, row
        first = f"experts.0.{row.projections[0]}.weight"
        self.dtype = "int8" if quantized and f"{first}_scale" in tensors else "bf16"
        stored = tensors.dtype(first) if first in tensors else None
        # One layer has one weight dtype; int8 without a scale is refused as any unknown dtype is.
        self._stored = ("I8",) if self.dtype == "int8" else (stored,) if stored in FLOATS else FLOATS

    @property
    def routing(self) -> dict[str, Any]:
        """The keyword arguments of `tvm_moe.route` that go with the logits of `router`."""
        row, config = self._row, self._config
        num_groups, topk_groups = groups(config)
        return {
            "top_k": self.top_k,
            "scoring": row.scoring,
            "renormalize": bool(config.get("norm_topk_prob", row.renormalize)),
            "correction_bias": self._tensors.vector(row.correction_bias, self.num_experts),
            "num_groups": num_groups,
            "topk_groups": topk_groups,
            "scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
            "per_expert_scale": self._tensors.vector(row.per_expert_scale, self.num_experts),
        }

    def expert(self, e: int) -> ExpertWeights:
        """Expert ``e``, its tensors checked against the config and against each other; int8 with f32 scales, or floats.

        Views of the file where the format allows it: read them, never write to them.
        """
        return self._fused_expert(e) if "experts.gate_up_proj" in self._tensors else self._separate_expert(e)

    def experts(self) -> Iterator[ExpertWeights]:
        """All experts in order, one at a time."""
        return map(self.expert, range(self.num_experts))

    def pack(
        self, dtype: str | None = None, isa: str | None = None, progress: Callable[[int], None] | None = None
    ) -> PackedExperts:
        """All experts, packed as they are read: memory is the packed layer and one expert. ``progress(e)`` after each."""
        if self.dtype == "int8" and dtype == "bf16":
            raise MoEError("this checkpoint is stored in INT8 and runs as it is; leave dtype (--dtype bf16) out")
        return PackedExperts.from_experts(
            self.experts(), self.num_experts, self.hidden_size, self.intermediate_size,
            dtype=dtype or self.dtype, isa=isa, progress=progress, **self.options,
        )  # fmt: skip

    def router(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, E]`` in f32 of ``hidden [T, H]`` in any float dtype."""
        return self.router_module()(hidden)

    def router_module(self) -> Router:
        scale = self._tensors.vector(self._row.router_scale, self.hidden_size)
        return Router(self.router_weight(), self.router_bias(), scale, self._config.get("rms_norm_eps", 1e-6))

    def router_weight(self) -> torch.Tensor:
        """``[E, H]`` in f32."""
        return self._tensors.dense(self._row.router, (self.num_experts, self.hidden_size))

    def router_bias(self) -> torch.Tensor | None:
        """``[E]`` in f32, or None."""
        return self._tensors.vector(f"{self._row.router}.bias" if self._row.router_bias else None, self.num_experts)

    def shared_expert(self, hidden: torch.Tensor) -> torch.Tensor:
        """The shared experts of ``hidden [T, H]`` by torch, in its dtype; quantized weights are dequantized."""
        return self.shared_module(hidden.dtype)(hidden)

    def shared_module(self, dtype: torch.dtype = torch.bfloat16) -> SharedExpert:
        """The shared experts as a torch module with weights of ``dtype``."""
        if not self.has_shared_experts:
            raise CheckpointError(f"layer {self.index} has no shared experts; ask has_shared_experts first")
        shared, size, H = self._row.shared, shared_size(self._config), self.hidden_size

        def weight(name: str, N: int, K: int) -> torch.Tensor:
            return self._tensors.dense(name, (N, K)).to(dtype)

        gate, up = (weight(f"{shared}.{name}_proj", size, H) for name in ("gate", "up"))
        weigher = None if self._row.shared_gate is None else weight(self._row.shared_gate, 1, H)
        return SharedExpert(gate, up, weight(f"{shared}.down_proj", H, size), self.activation, weigher)

    def _separate_expert(self, e: int) -> ExpertWeights:
        H, I = self.hidden_size, self.intermediate_size
        if self._row.bias or self._row.interleaved:
            raise CheckpointError(
                f"layer {self.index}: experts of this model type are read as fused tensors (experts.gate_up_proj), not one "
                "by one; save the checkpoint with transformers"
            )
        (gate, gate_scale), (up, up_scale), (down, down_scale) = (
            self._tensors.linear(f"experts.{e}.{projection}", shape, self._stored)
            for projection, shape in zip(self._row.projections, ((I, H), (I, H), (H, I)), strict=True)
        )
        scale = None if gate_scale is None or up_scale is None else torch.cat([gate_scale, up_scale])
        return ExpertWeights(torch.cat([gate, up]), down, scale, down_scale)

    def _fused_expert(self, e: int) -> ExpertWeights:
        E, H, I = self.num_experts, self.hidden_size, self.intermediate_size
        w13, w2 = self._fused("experts.gate_up_proj", e, 2 * I, H), self._fused("experts.down_proj", e, H, I)
        if not self._row.bias:
            return ExpertWeights(w13, w2)
        b13 = self._tensors.row("experts.gate_up_proj_bias", (E, 2 * I), e)
        return ExpertWeights(w13, w2, w13_bias=b13, w2_bias=self._tensors.row("experts.down_proj_bias", (E, H), e))

    def _fused(self, name: str, e: int, N: int, K: int) -> torch.Tensor:
        shape = (K, N) if self._row.transposed else (N, K)
        part = self._tensors.row(name, (self.num_experts, *shape), e)
        return part.T if self._row.transposed else part
