"""Random layers, and how far another correct implementation may be from the reference: derived, never tuned."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tvm_moe import PackedExperts, fused_moe, pack_experts, reference
from tvm_moe.activations import ActivationSpec, resolve
from tvm_moe.kernels import MicroKernel

U = 2.0**-24  # unit roundoff of f32
U_BF16 = 2.0**-8  # unit roundoff of bf16: 8 significant bits

# Options of `make_case`: each activation with each of its parameters, limits low enough to clamp much.
ACTIVATION_OPTIONS = [
    {"activation": "silu"},
    {"activation": "silu", "limit": 0.5},
    {"activation": "gelu"},
    {"activation": "gelu_pytorch_tanh"},
    {"activation": "swigluoai", "interleaved": True},
    {"activation": "swigluoai", "alpha": 0.9, "limit": 0.5},
    {"activation": "swiglustep", "limit": 0.5},
    {"activation": "relu2"},
]


@dataclass(frozen=True)
class Case:
    """One call of the layer: ``options`` are the keyword arguments shared by `pack_experts` and the reference."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    weights: Tensor
    ids: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    on_input: bool = False

    def reference(self) -> Tensor:
        return reference.fused_moe(
            self.x,
            self.w13,
            self.w2,
            self.weights,
            self.ids,
            **self.options,
            apply_router_weight_on_input=self.on_input,
        )

    def pack(self, kernel: MicroKernel | None = None) -> PackedExperts:
        """Packed for a row of the table, whose dtype the case must have (None: for the best level)."""
        options = self.options | ({"dtype": kernel.dtype, "isa": kernel.isa} if kernel else {})
        return pack_experts(self.w13, self.w2, **options)

    def run(self, packed: PackedExperts, out: Tensor | None = None) -> Tensor:
        return fused_moe(self.x, packed, self.weights, self.ids, self.on_input, out)

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def spec(self) -> ActivationSpec:
        o = self.options
        return resolve(o.get("activation", "silu"), o.get("alpha"), o.get("limit"))

    @property
    def dtype(self) -> str:
        return self.options.get("dtype") or ("int8" if self.w13.dtype == torch.int8 else "bf16")


def make_case(
    T: int = 5,
    E: int = 4,
    H: int = 24,
    I: int = 20,
    k: int = 2,
    *,
    weights: str = "bf16",
    x_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    on_input: bool = False,
    seed: int = 0,
    **options: Any,
) -> Case:
    """A seeded layer with ``weights`` "f32", "f16", "bf16" or "int8" (whole range, -128 too); values are of order 1."""
    rng = torch.Generator().manual_seed(seed)
    rows = (2 if resolve(options.get("activation", "silu"), None, options.get("limit")).gated else 1) * I
    w13, s13 = random_weight(rng, E, rows, H, weights)
    w2, s2 = random_weight(rng, E, H, I, weights)
    if s13 is not None:
        options |= {"w13_scale": s13, "w2_scale": s2}
    if bias:
        options |= {"w13_bias": torch.randn(E, rows, generator=rng), "w2_bias": torch.randn(E, H, generator=rng)}
    x = torch.randn(T, H, generator=rng).to(x_dtype)
    topk = torch.rand(T, k, generator=rng).softmax(-1)
    return Case(x, w13, w2, topk, random_ids(rng, T, E, k), options, on_input)


def random_weight(rng: torch.Generator, E: int, N: int, K: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """``[E, N, K]`` of deviation K^-0.5, so that products stay of order 1; int8 comes with a scale ``[E, N]``."""
    if kind == "int8":
        scale = (0.5 + torch.rand(E, N, generator=rng)) / (74 * K**0.5)  # 74: deviation of uniform int8
        return torch.randint(-128, 128, (E, N, K), generator=rng, dtype=torch.int8), scale
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    return (torch.randn(E, N, K, generator=rng) / K**0.5).to(dtype), None


def random_ids(rng: torch.Generator, T: int, E: int, k: int) -> Tensor:
    """int32 ``[T, k]``, k distinct experts a token."""
    return torch.rand(T, E, generator=rng).argsort(-1)[:, :k].to(torch.int32)


def assert_matches_reference(got: Tensor, case: Case, *, rounding: float = 0.0) -> None:
    """``got [T, H]`` is within `moe_bound` of the reference, plus its own last rounding; NaN only where it must be."""
    want = case.but(x=case.x.float()).reference()  # before the last rounding
    bound = moe_bound(case, rounding=rounding)
    # Half a unit in the last place of the output, and its underflow.
    bound += torch.finfo(got.dtype).eps / 2 * (want.double().abs() + bound) + torch.finfo(got.dtype).tiny
    assert_within(got, want, bound)


def assert_within(got: Tensor, want: Tensor, bound: Tensor | float) -> None:
    """|got - want| <= bound everywhere and NaN in the same places; the message shows the worst element."""
    assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
    got, want = got.double(), want.double()
    assert torch.equal(got.isnan(), want.isnan()), f"NaN at {got.isnan().nonzero()}, expected {want.isnan().nonzero()}"
    bound = torch.as_tensor(bound, dtype=torch.float64).expand(want.shape)
    excess = torch.where((got == want) | want.isnan(), 0.0, (got - want).abs() / bound)
    if want.numel() and not excess.max() <= 1:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), want.shape))
        raise AssertionError(
            f"at {at}: got {got[at]}, expected {want[at]} +- {bound[at]} ({(excess > 1).sum()} outside)"
        )


@torch.no_grad()
def moe_bound(case: Case, *, rounding: float = 0.0) -> Tensor:
    """f64 ``[T, H]``: how far a correct implementation may be from the reference before the last rounding.

    For random layers as `make_case` makes them (two steps below take signs for random). Free are the order of the f32
    sums, FMA, and 16 roundings in an activation; the places where operands are rounded to bf16 or int8 are not: a value
    of the intermediate may only round otherwise if its own bound reaches across the rounding boundary. ``rounding`` is
    the unit roundoff of peers that round every stage's result (`U_BF16`).
    """
    k = case.ids.shape[1]
    bound = torch.zeros(case.x.shape, dtype=torch.float64)
    for e in range(len(case.w13)):
        t, j = torch.where(case.ids == e)
        if not len(t):
            continue
        w = case.weights[t, j, None].float()
        x = case.x[t].float() * w if case.on_input else case.x[t].float()
        g_u, d = _linear(case, x, torch.zeros_like(x).double(), "w13", e, rounding)
        h, d = _activate(case, g_u, d, rounding)
        y, d = _linear(case, h, d, "w2", e, rounding)
        w = torch.ones_like(w) if case.on_input else w.abs().double()
        # Weighting and up to k additions, each relative to at most the sum of all magnitudes; twice for both sides.
        bound.index_add_(0, t, w * (d + 2 * (k + 2) * (U + rounding) * (y.abs() + d)))
    return bound


def _linear(case: Case, x: Tensor, d: Tensor, name: str, e: int, rounding: float) -> tuple[Tensor, Tensor]:
    """Value and deviation (f64 ``[R, N]``) of one product of operands known to ``x +- d``."""
    w, scale = getattr(case, name)[e], case.options.get(f"{name}_scale")
    bias = case.options.get(f"{name}_bias")
    if case.dtype == "int8":
        w, scale = (w, scale[e].flatten().float()) if scale is not None else reference.quantize_weight(w)
        y, dev = _int8_product(x, d, w.double(), scale.double())
    else:
        y, dev = _float_product(x.double(), d, w, case.dtype)
    if bias is not None:
        y = y + bias[e].double()
    # The additions of the bias on both sides, and the rounding of a peer.
    return y, dev + 2 * U * (y.abs() + dev) + rounding * (y.abs() + dev)


def _float_product(x: Tensor, d: Tensor, w: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    def rnd(v: Tensor) -> Tensor:
        return v.float().bfloat16().double() if dtype == "bf16" else v

    w = rnd(w.double())
    q = rnd(x)
    dq = torch.maximum((rnd(x + d) - q).abs(), (rnd(x - d) - q).abs())  # rounding is monotone
    # K roundings of at most U each relative to the sum of magnitudes, in any order of summation: K * U in the worst
    # case, and sqrt(K) * 8 U with probability 1 - 2K e^-32 for random data (Higham and Mary, A New Approach to
    # Probabilistic Rounding Error Analysis, 2019, theorem 2.4). 2 more for the reference's rounding and order U^2.
    K = x.shape[1]
    magnitude = (q.abs() + dq) @ w.abs().T
    return q @ w.T, _spread(dq, w) + (min(K, 8 * K**0.5) + 2) * U * magnitude


def _spread(d: Tensor, w: Tensor) -> Tensor:
    """How far deviations up to ``d [R, K]`` can take a product with ``w [N, K]``.

    All in one direction in the worst case; beyond 8 sqrt(sum of squares) with probability 2 e^-32 (Hoeffding) where
    the signs are random, as they are with the random weights of `make_case`.
    """
    return torch.minimum(d @ w.abs().T, 8 * (d**2 @ (w**2).T).sqrt())


def _int8_product(x: Tensor, d: Tensor, w: Tensor, w_scale: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = (v.double() for v in reference.quantize_rows(x.float()))
    scale = scale[:, None]
    exact = d.amax(-1, keepdim=True) == 0  # the same operand: the same scale and the same integers
    # |max|a| - max|b|| <= max|a - b|, then a rounded division.
    ds = torch.where(exact, 0.0, d.amax(-1, keepdim=True) / 127 + U * scale)
    z = x.double() / scale
    dz = torch.where(exact, 0.0, (d + z.abs() * ds) / (scale - ds).clamp(min=1e-300) + 2 * U * z.abs())
    dq = torch.maximum((_to_int8(z + dz) - q).abs(), (_to_int8(z - dz) - q).abs())
    acc = q @ w.T
    y = acc * scale * w_scale
    # f32(acc), the product of the scales and its application: 3 roundings a side.
    return y, w_scale * ((scale + ds) * _spread(dq, w) + ds * acc.abs()) + 6 * U * y.abs()


def _to_int8(z: Tensor) -> Tensor:
    return torch.round(z).clamp(-127, 127)


def _activate(case: Case, g_u: Tensor, d: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    spec, interleaved = case.spec, case.options.get("interleaved", False)
    h = reference.activate(g_u.float(), spec, interleaved).double()
    slack = 32 * U + 8 * rounding  # 16 roundings a side (exp or tanh within 4 ulp), 8 of a peer
    if not spec.gated:
        return h, d * (2 * g_u.abs() + d) + slack * (h + d)
    (g, u), (dg, du) = (
        (v[:, 0::2], v[:, 1::2]) if interleaved else v.chunk(2, dim=-1) for v in (g_u.clamp(-1e30, 1e30), d)
    )
    u = u.clamp(-spec.limit, spec.limit)  # clamps shorten distances
    if spec.name != "swiglustep":
        g = g.clamp(max=spec.limit)
    # h = a(g) * (u or u + 1) with |a(g)| <= |g| and |a'| < 1.13 (gelu's 1.129 is the largest; any alpha > 0: 1.0999).
    span = u.abs() + du + 1
    return h, 1.13 * dg * span + g.abs() * du + slack * (g.abs() + dg) * span
