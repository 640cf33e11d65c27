"""Some columns of a layer's intermediate: views of its weights, cut, quantized and packed expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import api
from ..activations import NONE, ActivationSpec
from ..errors import MoEError
from ..expert_weights import VECTORS, ExpertWeights
from ..experts import PackedExperts


@dataclass(frozen=True)
class Shard:
    """w13 [E, parts, I, H] with gate and up as parts, or one part; w2 [E, H, I]; I is that of the shard.

    w13_scale, w13_bias: [E, parts, I]; w2_scale, w2_bias: [E, H] of the whole layer. A floating w2 with scales is yet to be
    quantized.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    @classmethod
    def cut(
        cls,
        w13: Tensor,
        w2: Tensor,
        parts: int,
        interleaved: bool,
        share: Callable[[int], range],
        vectors: dict[str, Tensor | None],
    ) -> Shard:
        """Columns ``share(I)`` of a layer given as `pack_experts` takes it, or MoEError."""
        api.check_weights(w13, w2)
        E, H, I = w2.shape
        if w13.shape[1] != parts * I:
            raise MoEError(f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} disagree: w13 must have {parts * I} rows")
        for name, vector in vectors.items():
            api.check_vector(name, vector, E, parts * I if "13" in name else H)
        own = share(I)

        def gate_up(tensor: Tensor | None) -> Tensor | None:
            """[E, parts * I, ...] in its parts."""
            if tensor is None:
                return None
            apart = tensor.unflatten(1, (I, parts)).transpose(1, 2) if interleaved else tensor.unflatten(1, (parts, I))
            return columns(apart, 2, own)

        flat = {name: None if v is None else v.reshape(E, -1) for name, v in vectors.items()}
        cut13 = {name: gate_up(v) for name, v in flat.items() if "13" in name}
        return cls(w13=gate_up(w13), w2=columns(w2, 2, own), **flat | cut13)  # type: ignore[arg-type]

    @property
    def num_experts(self) -> int:
        return self.w2.shape[0]

    def peaks(self) -> Tensor:
        """f32 [E, H]: the largest magnitude of each row of w2."""
        if self.w2_scale is not None:
            raise MoEError("w2_scale given for floating weights; scales belong to int8 weights: leave them out")
        peaks = torch.stack([w.float().abs().amax(1) for w in self.w2])
        if len(bad := torch.nonzero(~peaks.isfinite().all(1))):
            raise MoEError(f"expert {int(bad[0])}, w2: weights are not finite (NaN or Inf); check the checkpoint")
        return peaks

    def scaled(self, peaks: Tensor) -> Shard:
        """With the scales of w2, from the largest magnitudes of its whole rows."""
        return replace(self, w2_scale=torch.where(peaks == 0, 1.0, peaks / 127))

    def whole(self, e: int) -> ExpertWeights:
        """Expert ``e`` for a layer."""
        vectors = {name: None if (v := getattr(self, name)) is None else v[e].reshape(-1) for name in VECTORS}
        return ExpertWeights(self.w13[e].flatten(0, 1), self.w2[e], **vectors)

    def gate_up(self, e: int) -> ExpertWeights:
        """Gate and up rows of expert ``e``, one matrix."""
        whole = self.whole(e)
        return ExpertWeights.linear(whole.w13, whole.w13_scale, whole.w13_bias)

    def down(self, e: int) -> ExpertWeights:
        """w2 of expert ``e`` in int8, with a column of zeros more."""
        whole, w = self.whole(e), self.w2[e]
        if w.is_floating_point() and whole.w2_scale is not None:
            w = torch.round(w.float() / whole.w2_scale[:, None]).clamp(-127, 127).to(torch.int8)
        return ExpertWeights.linear(functional.pad(w, (0, 1)), whole.w2_scale, whole.w2_bias)

    def pack(self, expert: Callable[[int], ExpertWeights], N: int, K: int, **options: Any) -> PackedExperts:
        E = self.num_experts
        return PackedExperts.from_experts(map(expert, range(E)), E, N, K, **options)

    def pack_layer(self, spec: ActivationSpec, dtype: str, isa: str | None) -> PackedExperts:
        """As `pack_experts` makes it."""
        _, H, I = self.w2.shape
        return self.pack(self.whole, H, I, dtype=dtype, activation=spec, isa=isa)

    def pack_stages(self, isa: str | None) -> tuple[PackedExperts, PackedExperts]:
        """Gate/up and down projections in int8, as `pack_linear` makes them."""
        _, parts, I, H = self.w13.shape
        pack = partial(self.pack, dtype="int8", activation=NONE, isa=isa)
        return pack(self.gate_up, parts * I, H), pack(self.down, H, I + 1)


def columns(tensor: Tensor, dim: int, own: range) -> Tensor:
    """A view of columns ``own``; of none, one of zeros, which adds nothing to a layer's result."""
    if own:
        return tensor.narrow(dim, own.start, len(own))
    return tensor.new_zeros(1).expand([1 if d == dim else n for d, n in enumerate(tensor.shape)])
