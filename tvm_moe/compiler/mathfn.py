"""Vector math for epilogues, as TE expressions: no libm call per lane, NaN in gives NaN out.

Errors are against float64, found by `tests/test_mathfn.py` over the whole range. Rounding goes through the 1.5 * 2^23 trick
because floor and rint are library calls on baseline x86-64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from ..errors import MoEError

MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer (half to even) in the low mantissa bits
MAGIC_BITS = 0x4B400000


def f32(value: float) -> tirx.PrimExpr:
    return tirx.const(value, "float32")


def let(value: tirx.PrimExpr, body: Callable[[tirx.Var], tirx.PrimExpr]) -> tirx.PrimExpr:
    """``body(value)`` with the value computed once: without it, expressions that use a value twice grow exponentially.

    A float travels as its bits, because TVM's integer analysis fails on float values of a Let; the casts cost nothing.
    """
    kind = str(value.ty)
    bits = tirx.reinterpret("int32", value) if kind == "float32" else value
    var = tirx.Var("v", bits.ty)
    return tirx.Let(var, bits, body(tirx.reinterpret("float32", var) if kind == "float32" else var))


def at_most(x: tirx.PrimExpr, bound: tirx.PrimExpr | None) -> tirx.PrimExpr:
    """min(x, bound) that keeps a NaN x (the comparison is false for NaN); x where there is no bound."""
    return x if bound is None else let(x, lambda v: tirx.Select(v > bound, bound, v))


def at_least(x: tirx.PrimExpr, bound: tirx.PrimExpr | None) -> tirx.PrimExpr:
    return x if bound is None else let(x, lambda v: tirx.Select(v < bound, bound, v))


def round_bits(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Nearest integer of |x| < 2^22 as int32, half to even."""
    return tirx.reinterpret("int32", x + f32(MAGIC)) - tirx.const(MAGIC_BITS, "int32")


def divided(x: tirx.PrimExpr, by: tirx.PrimExpr, reciprocal: tirx.PrimExpr) -> tirx.PrimExpr:
    """``x / by`` with the rounding of a division, from ``1 / by`` rounded, in a third of its time.

    Brisebarre, Muller, Raina 2004, "Accelerating correctly rounded floating-point division when the divisor is known in
    advance": exact where nothing over- or underflows. Needs fused multiply-add.
    """

    def refined(q: tirx.Var) -> tirx.PrimExpr:
        return fma(fma(-q, by, x), reciprocal, q)

    return let(x * reciprocal, refined)


def fma(a: tirx.PrimExpr, b: tirx.PrimExpr, c: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", a, b, c)


def exp_minus(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """e^-x with relative error < 2e-7 for x in [-88.37, 87.3]; below it +inf, above it the smallest normal number.

    It has to reach infinity: with a largest finite value, silu(-3e38) would be -3e38 / 2e38 instead of 0. A NaN becomes any
    of these: who uses it has x in another factor. So each clamp is one instruction.
    """

    def reduced(x: tirx.Var, shifted: tirx.Var) -> tirx.PrimExpr:
        n = shifted - f32(MAGIC + 127)
        r = let(n, lambda n: x + n * f32(0.693359375) + n * f32(-2.12194440e-4))
        power = tirx.reinterpret("float32", tirx.reinterpret("int32", shifted) << tirx.const(23, "int32"))
        return let(r, exp_polynomial) * power

    low, high = f32(-88.5), f32(87.3)  # 88.5 / ln 2 rounds to 128: inf
    clamped = let(let(x, lambda v: tirx.Select(v > low, v, low)), lambda v: tirx.Select(v < high, v, high))
    # n in the low mantissa bits, with the bias of an exponent.
    return let(clamped, lambda x: let(x * f32(-1.44269504088896341) + f32(MAGIC + 127), lambda s: reduced(x, s)))


def exp_polynomial(r: tirx.Var) -> tirx.PrimExpr:
    """e^-r for |r| <= ln(2) / 2 within 1.05e-7, the least that two more terms with free coefficients each can give."""
    c3, c2, c1, c0 = map(f32, (8.312501386e-3, -4.189033200e-2, 1.6667115389e-1, -4.99992303064e-1))
    return let(r * r, lambda r2: f32(1.0) - (((c3 * r + c2) * r2 + (c1 * r + c0)) * r2 + r))


def silu(g: tirx.PrimExpr, alpha: tirx.PrimExpr | None = None) -> tirx.PrimExpr:
    """g * sigmoid(alpha * g)."""
    return let(g, lambda g: g / (f32(1.0) + exp_minus(g if alpha is None else alpha * g)))


def erfc_positive(x: tirx.Var) -> tirx.PrimExpr:
    """erfc(x) for 0 <= x < 9, relative error < 5e-7 + x^2 * 2^-23 (Numerical Recipes, 6.2, erfcc: 1.2e-7 of it).

    The exponent -x^2 + ... has two roundings relative to x^2. Beyond 9 the result is smaller than 1e-36.
    """

    def tail(t: tirx.Var) -> tirx.PrimExpr:
        p = f32(0.17087277)
        for c in ERFC:
            p = p * t + f32(c)
        return t * exp_minus(x * x - p)

    return let(f32(1.0) / (f32(1.0) + f32(0.5) * x), tail)


ERFC = (-0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223)


def gelu(g: tirx.PrimExpr) -> tirx.PrimExpr:
    """g * 0.5 * (1 + erf(g / sqrt 2)), through erfc of |g| so that the negative tail keeps its relative accuracy."""
    scaled = g * f32(1.0 / math.sqrt(2.0))
    magnitude = let(scaled, lambda s: tirx.Select(s < f32(0.0), f32(0.0) - s, s))
    tail = f32(0.5) * let(magnitude, erfc_positive)
    return g * let(tail, lambda tail: tirx.Select(g < f32(0.0), tail, f32(1.0) - tail))


def gelu_tanh(g: tirx.PrimExpr) -> tirx.PrimExpr:
    """g * 0.5 * (1 + tanh(z)) = g * sigmoid(2 z): no NaN for large |g|, since exp may overflow: g / inf = 0."""
    z2 = f32(2.0 * 0.7978845608) * (g + f32(0.044715) * g * g * g)
    return g / (f32(1.0) + exp_minus(z2))


def relu2(g: tirx.PrimExpr) -> tirx.PrimExpr:
    return let(at_least(g, f32(0.0)), lambda v: v * v)


def activate(
    name: str, g: tirx.PrimExpr, u: tirx.PrimExpr, alpha: tirx.PrimExpr, limit: tirx.PrimExpr | None
) -> tirx.PrimExpr:
    """The activation ``name`` (`activations.ACTIVATIONS`) of a gate and an up value; relu2 has only g. None: no limit."""

    def clamped(u: tirx.PrimExpr) -> tirx.PrimExpr:
        return at_least(at_most(u, limit), None if limit is None else f32(0.0) - limit)

    forms: dict[str, Callable[[tirx.Var], tirx.PrimExpr]] = {
        "silu": lambda g: silu(at_most(g, limit)) * clamped(u),
        "gelu": lambda g: gelu(g) * u,
        "gelu_tanh": lambda g: gelu_tanh(g) * u,
        "swigluoai": lambda g: (clamped(u) + f32(1.0)) * silu(at_most(g, limit), alpha),
        "swiglustep": lambda g: at_most(silu(g), limit) * clamped(u),
        "relu2": relu2,
    }
    if name not in forms:
        raise MoEError(f"activation {name!r} has no compiled form; add it to mathfn.activate")
    return let(g, forms[name])
