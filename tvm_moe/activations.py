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

    @property
    def limits(self) -> tuple[bool, ...]:
        """Without a limit, with one: which of both there is."""
        return (True,) if self.needs_limit or self.limit else (False, True) if self.takes_limit else (False,)


ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("silu", 0, takes_limit=True),
        Activation("gelu", 1),
        Activation("gelu_tanh", 2),
        Activation("swigluoai", 3, takes_alpha=True, takes_limit=True, alpha=1.702, limit=7.0),
        Activation("swiglustep", 4, takes_limit=True, needs_limit=True),
        Activation("relu2", 5, gated=False),
    )
}
LINEAR = Activation("linear", 6, gated=False)  # what `pack_linear` makes has no gate/up projections to activate
# Added to an activation's code: what the compiled form of it clamps and adds.
LIMITED, BIASED = 8, 16
FORMS = {
    a.code + LIMITED * limited + BIASED * biased: (a, limited, biased)
    for a in ACTIVATIONS.values()
    for limited in a.limits
    for biased in (False, True)
}
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

    @property
    def code(self) -> int:
        return self.kind.code + LIMITED * (self.limit < math.inf)


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
