"""One cell of the result: a model, a token count, a routing and a dtype; every side's figures beside the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..models import LayerShape
from .checks import Check
from .layers import Source
from .peers import OURS
from .roofline import Limits, Roofline
from .routing import Workload
from .timing import Spread


@dataclass(frozen=True)
class Result:
    """What one side did: times, and whether its output was right (None: it was not asked)."""

    side: str
    seconds: list[float]  # a call a round
    check: Check | None


def cell(
    shape: LayerShape, workload: Workload, dtype: str, touched: float, results: list[Result], limits: list[Limits]
) -> dict[str, Any]:
    """Plain data. ``touched``: experts a call reads; ``limits``: of each round, none where no probe could run."""
    operations = shape.operations(workload.tokens)
    nbytes = touched * Source(shape, dtype).expert_bytes
    roofs = [Roofline(operations, nbytes, x.peak[dtype], x.bandwidth) for x in limits]
    roof = Spread.of([r.seconds for r in roofs]) if roofs else None
    made: dict[str, Any] = {
        "model": shape.name, "H": shape.H, "I": shape.I, "E": shape.E, "k": shape.k,
        "activation": shape.activation, "bias": shape.bias,
        "tokens": workload.tokens, "routing": workload.routing, "dtype": dtype,
        "touched_experts": touched, "operations": operations, "bytes": nbytes,
        "peak_gops": median(r.peak / 1e9 for r in roofs), "bandwidth_gbs": median(r.bandwidth / 1e9 for r in roofs),
        "roofline_ms": roof and roof.median * 1e3, "roofline_q1_ms": roof and roof.q1 * 1e3,
        "roofline_q3_ms": roof and roof.q3 * 1e3, "roofline_limit": roofs[len(roofs) // 2].limit if roofs else None,
        "sides": [side(result, operations, nbytes, roofs) for result in results],
        "int8_over_bf16": None, "skew_cost": None,
    }  # fmt: skip
    return made | ratios(results)


def side(result: Result, operations: float, nbytes: float, roofs: list[Roofline]) -> dict[str, Any]:
    """Times in ms; useful GOPS; GB/s of touched weights; share of the roofline, round by round."""
    spread = Spread.of(result.seconds)
    times = {name: value * 1e3 for name, value in asdict(spread).items() if name != "count"}
    check = result.check and {**asdict(result.check), "passed": result.check.passed}
    return {
        "side": result.side, "ms": times.pop("median"), **{f"{name}_ms": value for name, value in times.items()},
        "count": spread.count, "gops": operations / spread.median / 1e9, "gbs": nbytes / spread.median / 1e9,
        "roofline": median(r.share(s) for r, s in zip(roofs, result.seconds, strict=False)), "check": check,
    }  # fmt: skip


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def ratios(results: list[Result]) -> dict[str, Any]:
    """How many times as fast as each peer, and as the best of those whose output is right, we are.

    Medians of the ratios within a round: what the machine gives changes by a factor of two from second to second, and
    both sides of a round had the same.
    """
    ours = next((r.seconds for r in results if r.side == OURS.name), None)
    peers = {r.side: r.seconds for r in results if r.side != OURS.name and r.check and r.check.passed}
    ratio = (
        {n: statistics.median(p / o for p, o in zip(s, ours, strict=True)) for n, s in peers.items()} if ours else {}
    )
    best = min(ratio, key=ratio.__getitem__) if ratio else None
    return {"ratio": ratio, "best_peer": best, "ratio_to_best_peer": ratio[best] if best else None}


def our_ms(cell: dict[str, Any]) -> float | None:
    return next((s["ms"] for s in cell["sides"] if s["side"] == OURS.name), None)


def compare_dtypes(cells: list[dict[str, Any]]) -> None:
    """Fill in ``int8_over_bf16``: our BF16 time over our INT8 time, in the INT8 cells."""
    by_key = {(c["model"], c["tokens"], c["routing"], c["dtype"]): our_ms(c) for c in cells}
    for c in cells:
        int8, bf16 = (by_key.get((c["model"], c["tokens"], c["routing"], d)) for d in ("int8", "bf16"))
        if c["dtype"] == "int8" and int8 and bf16:
            c["int8_over_bf16"] = bf16 / int8
