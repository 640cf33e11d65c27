"""The activations of MoE experts and the parameters each one takes (plain data; formulas are in `reference`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import MoEError


@dataclass(frozen=True)
class Activation:
    """One row: ``gated`` tells w13 ``[E, 2I, H]`` from ``[E, I, H]``; None as a default means the parameter is optional."""

    name: str
    code: int  # what the compiled modules switch on; never reused
    gated: bool = True
    takes_alpha: bool = False
    takes_limit: bool = False
    alpha: float | None = None
    limit: float | None = None
    needs_limit: bool = False
    plain: bool = False  # has a compiled form for layers without limit and bias, besides the one for all


ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("silu", 0, takes_limit=True, plain=True),
        Activation("gelu", 1),
        Activation("gelu_tanh", 2),
        Activation("swigluoai", 3, takes_alpha=True, takes_limit=True, alpha=1.702, limit=7.0),
        Activation("swiglustep", 4, takes_limit=True, needs_limit=True),
        Activation("relu2", 5, gated=False),
    )
}
LINEAR = Activation("linear", 6, gated=False)  # what `pack_linear` makes has no gate/up projections to activate
PLAIN = 8  # added to the code of an activation: its plain form
FORMS = {a.code + PLAIN * plain: (a, plain) for a in ACTIVATIONS.values() for plain in sorted({False, a.plain})}
ALIASES = {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}


@dataclass(frozen=True)
class ActivationSpec:
    """A resolved activation: ``alpha`` is 1 and ``limit`` is +inf where the activation has none or none was given."""

    kind: Activation
    alpha: float
    limit: float

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def gated(self) -> bool:
        return self.kind.gated

    def form(self, biased: bool) -> int:
        """The code of the compiled form for a layer."""
        return self.kind.code + PLAIN * (self.kind.plain and self.limit == math.inf and not biased)


NONE = ActivationSpec(LINEAR, 1.0, math.inf)


def resolve(name: str, alpha: float | None = None, limit: float | None = None) -> ActivationSpec:
    """The activation called ``name``; unknown names and parameters it does not take are errors, never ignored."""
    kind = ACTIVATIONS.get(ALIASES.get(name, name))
    if kind is None:
        raise MoEError(f"unknown activation {name!r}; expected one of {sorted([*ACTIVATIONS, *ALIASES])}")
    for label, value, taken in (("alpha", alpha, kind.takes_alpha), ("limit", limit, kind.takes_limit)):
        if value is not None and not taken:
            raise MoEError(f"activation {name!r} takes no {label}, got {label}={value}; leave it out")
    alpha = kind.alpha if alpha is None else alpha
    limit = kind.limit if limit is None else limit
    if limit is None and kind.needs_limit:
        raise MoEError(f"activation {name!r} needs a limit (a positive number), got None")
    if alpha is not None and not math.isfinite(alpha):
        raise MoEError(f"alpha must be a finite number, got {alpha}")
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise MoEError(f"limit must be a positive finite number, got {limit}")
    return ActivationSpec(kind, 1.0 if alpha is None else float(alpha), math.inf if limit is None else float(limit))
