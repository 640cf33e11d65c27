"""torch.library operators, for torch.compile, torch.export and everything else that records calls instead of making them.

``tvm_moe::fused_moe`` takes a packed layer as its tensors and a description, so that a recorded program holds all it needs;
``tvm_moe::route`` is `route`. Both are for inference: a backward pass through them is an error.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import cache, partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import api, isa, packed_file, routing
from .errors import MoEError, UnsupportedISAError
from .experts import PackedExperts
from .runtime import ARRAYS

LAYERS = 4096  # remembered; a layer found again costs a few microseconds less than one described anew
LIBRARY = torch.library.Library("tvm_moe", "DEF")
LIBRARY.define(
    "fused_moe(Tensor hidden_states, Tensor[] packed, str layer, Tensor topk_weights, Tensor topk_ids, "
    "bool apply_router_weight_on_input=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "route(Tensor router_logits, int top_k, str scoring, bool renormalize, Tensor? correction_bias, int num_groups, "
    "int topk_groups, float scaling_factor, Tensor? per_expert_scale) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define("no_gradient(Tensor gradient, Tensor like) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

_layers: dict[tuple[Any, ...], PackedExperts] = {}
NBYTES = Tensor.nbytes.__get__  # type: ignore[attr-defined]


class Seen(NamedTuple):
    """A layer by its very tensors: the first one (held weakly), the others, the addresses of all, and how it is described."""

    first: Callable[[], Tensor | None]
    others: list[Tensor]
    at: list[int]
    layer: str
    experts: PackedExperts


_seen: dict[int, Seen] = {}  # by the first tensor's id; an entry goes when that tensor does


def tensors(experts: PackedExperts) -> list[Tensor]:
    """The ``packed`` argument of the operator; ``layer`` is `Layer.description`."""
    return [experts.layer.arrays[name] for name in ARRAYS]


def packed_experts(packed: list[Tensor], layer: str) -> PackedExperts:
    """`assembled`, remembered: tensors that are the very ones of a call before, at the same addresses, are its layer."""
    at = [*map(Tensor.data_ptr, packed)]
    if seen := _seen.get(id(packed[0]) if packed else 0):
        first, others, known_at, known_layer, found = seen
        # A tensor can be given another memory; its size is known as long as it is the same and lies where it lay.
        if at == known_at and first() is packed[0] and layer == known_layer and all(map(is_, others, packed[1:])):
            return found
    found = found_by_address(packed, layer)
    key, forget = id(packed[0]), _seen.pop
    _seen[key] = Seen(weakref.ref(packed[0], lambda _: forget(key, None)), packed[1:], at, layer, found)
    return found


def found_by_address(packed: list[Tensor], layer: str) -> PackedExperts:
    """`assembled`, remembered by the tensors' addresses alone: nothing is kept alive here.

    An entry whose tensors are gone stays true: whatever lies at the same addresses later, described alike, is read alike.
    """
    key = (layer, *map(Tensor.data_ptr, packed), *map(NBYTES, packed))
    found = _layers.get(key)
    if found is None or not all(map(Tensor.is_contiguous, packed)):
        if len(_layers) >= LAYERS:
            _layers.clear()
        found = _layers[key] = assembled(packed, layer)
        found.layer.arrays = {}
    return found


def assembled(packed: list[Tensor], layer: str) -> PackedExperts:
    """The layer that these tensors are, checked."""
    try:
        described = dict(json.loads(layer))
    except (ValueError, TypeError) as error:
        raise undescribed(layer, error) from error
    if len(packed) != len(ARRAYS):
        raise MoEError(
            f"packed has {len(packed)} tensors, expected the {len(ARRAYS)} of ops.tensors(): {', '.join(ARRAYS)}"
        )
    if bad := [name for name, t in zip(ARRAYS, packed, strict=True) if not t.is_contiguous() or not t.is_cpu]:
        raise MoEError(
            f"packed tensors {', '.join(bad)} are not contiguous or not on the CPU; pass them as they were packed"
        )
    made = packed_file.assemble(described, dict(zip(ARRAYS, packed, strict=True)), "the packed layer")
    runs, reason = isa.executable(made.kernel)
    if not runs:
        raise UnsupportedISAError(
            f"these experts are packed for {made.kernel.isa}, but {reason}; pack the weights here"
        )
    return PackedExperts(made)


def fused_moe(
    hidden_states: Tensor,
    packed: list[Tensor],
    layer: str,
    topk_weights: Tensor,
    topk_ids: Tensor,
    on_input: bool = False,
) -> Tensor:
    arguments = hidden_states, packed_experts(packed, layer), topk_weights, topk_ids, on_input
    served = api.known_call(*arguments)
    return api.checked_call(*arguments, None) if served is None else served


@cache
def columns(layer: str) -> int:
    """Of the output of a described layer."""
    try:
        return int(json.loads(json.loads(layer)["sizes"])["hidden"])
    except (ValueError, KeyError, TypeError) as error:
        raise undescribed(layer, error) from error


def undescribed(layer: str, error: object) -> MoEError:
    return MoEError(f"layer={layer[:80]!r} is no description of packed experts ({error}); pass Layer.description")


def fake_fused_moe(
    hidden_states: Tensor,
    packed: list[Tensor],
    layer: str,
    topk_weights: Tensor,
    topk_ids: Tensor,
    on_input: bool = False,
) -> Tensor:
    if len(devices := {t.device.type for t in (hidden_states, topk_weights, topk_ids)}) > 1:
        raise MoEError(
            f"hidden_states, topk_weights and topk_ids are on {', '.join(sorted(devices))}; all must be on the CPU"
        )
    return hidden_states.new_empty((hidden_states.shape[0], columns(layer)))


def fake_route(router_logits: Tensor, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = router_logits.shape[0], top_k
    return router_logits.new_empty(shape, dtype=torch.float32), router_logits.new_empty(shape, dtype=torch.int32)


class NoBackward(torch.autograd.Function):
    """Ties an output to its inputs by a backward pass that says why there is none; recorded, it says so when it runs."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], Any], *inputs: Tensor | None) -> Any:
        ctx.save_for_backward(*inputs)
        return call()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.ops.tvm_moe.no_gradient(gradients[0], t) if needed else None for t, needed in inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return no_gradient()


def no_gradient(*_: Tensor) -> Any:
    """An operator of the backward pass, so that a recorded one stays in it."""
    raise MoEError(
        "tvm_moe is for inference: no gradient flows through its operators; run under torch.no_grad(), or train with "
        "the model's own experts"
    )


def below_autograd(operator: Any, keys: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def wants_gradient(*inputs: Tensor | None) -> bool:
    if forward_ad._current_level >= 0:  # of dual numbers
        return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs)
    if torch.is_grad_enabled():
        for t in inputs:  # a generator costs half a microsecond more
            if getattr(t, "requires_grad", False):
                return True
    return False


def autograd_fused_moe(
    keys: Any, x: Tensor, packed: list[Tensor], layer: str, weights: Tensor, ids: Tensor, on_input: bool = False
) -> Tensor:
    """Straight to the call where it is known: torch's own registration would cost six microseconds more."""
    if wants_gradient(x, weights):
        run = partial(below_autograd, FUSED_MOE, keys, x, packed, layer, weights, ids, on_input)
        return NoBackward.apply(run, x, weights)
    if type(x) is Tensor and x.is_cpu:
        found = api.known_call(x, packed_experts(packed, layer), weights, ids, on_input)
        if found is not None:
            return found
    return below_autograd(FUSED_MOE, keys, x, packed, layer, weights, ids, on_input)


def autograd_route(keys: Any, logits: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    run, inputs = partial(below_autograd, ROUTE, keys, logits, *options), (logits, options[3], options[-1])
    return NoBackward.apply(run, *inputs) if wants_gradient(*inputs) else run()


LIBRARY.impl("no_gradient", no_gradient, "CPU")
torch.library.register_fake("tvm_moe::no_gradient", lambda gradient, like: torch.empty_like(like), lib=LIBRARY)
FUSED_MOE, ROUTE = torch.ops.tvm_moe.fused_moe.default, torch.ops.tvm_moe.route.default
for operator, implementation, fake, autograd in (
    (FUSED_MOE, fused_moe, fake_fused_moe, autograd_fused_moe),
    (ROUTE, routing.route, fake_route, autograd_route),
):
    LIBRARY.impl(operator, implementation, "CPU")
    LIBRARY.impl(operator, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(operator, fake, lib=LIBRARY)


def call(
    hidden_states: Tensor, experts: PackedExperts, topk_weights: Tensor, topk_ids: Tensor, on_input: bool
) -> Tensor:
    """`api.fused_moe` as a recorded call."""
    return FUSED_MOE(hidden_states, tensors(experts), experts.layer.description, topk_weights, topk_ids, on_input)
