"""vLLM's names of MoE activations, and what `pack_experts` is told of each."""

from __future__ import annotations

from typing import Any

from ...activations import ACTIVATIONS, resolve
from ...errors import MoEError

# vLLM's MoEActivation values -> ours
SERVED = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swigluoai": "swigluoai",  # gate and up rows alternate
    "swigluoai_uninterleave": "swigluoai",  # gate rows, then up rows
    "swiglustep": "swiglustep",
    "relu2_no_mul": "relu2",
}
REFUSED = {
    "relu2": "a squared ReLU with a gate is not among tvm_moe's activations",
    "situ": "not among tvm_moe's activations",
    "silu_no_mul": "tvm_moe's silu has a gate",
    "gelu_no_mul": "tvm_moe's gelu has a gate",
    "gelu_tanh_no_mul": "tvm_moe's gelu_tanh has a gate",
}
STEP_LIMIT = 7.0  # a constant of vLLM's swiglustep


def pack_options(
    name: str, limit: float | None = None, alpha: float | None = None, beta: float | None = None
) -> dict[str, Any]:
    """``activation``, ``alpha`` and ``limit`` of `pack_experts` for vLLM's activation and its three parameters.

    ``beta`` is what vLLM adds to the up projection. Raises MoEError, with the reason, where ours computes something else.
    """
    if name not in SERVED:
        raise MoEError(f"activation {name!r}: {REFUSED.get(name, 'unknown to this version of tvm_moe')}")
    served = SERVED[name]
    if name == "swigluoai_uninterleave":  # vLLM's defaults make a clamped silu of it
        alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
        if limit is None:
            raise MoEError(f"activation {name!r} needs a limit (swiglu_limit), got None")
        if (alpha, beta) == (1.0, 0.0):
            served = "silu"
    added = 1.0 if served == "swigluoai" else 0.0
    if beta not in (None, added):
        raise MoEError(
            f"activation {name!r} with beta={beta:g}: tvm_moe's {served} adds {added:g} to the up projection"
        )
    if alpha == 1.0 and not ACTIVATIONS[served].takes_alpha:
        alpha = None
    if served == "swiglustep" and limit is None:
        limit = STEP_LIMIT
    resolve(served, alpha, limit)
    return {"activation": served, "alpha": alpha, "limit": limit}
