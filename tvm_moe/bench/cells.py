"""One cell of the result: a model, a token count, a routing and a dtype; every side's figures beside the roofline."""

from __future__ import annotations

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
    spread: Spread
    check: Check | None


def cell(
    shape: LayerShape, workload: Workload, dtype: str, touched: float, results: list[Result], limits: Limits | None
) -> dict[str, Any]:
    """Plain data. ``touched``: experts a call reads; ``limits``: None where no probe could run."""
    operations = shape.operations(workload.tokens)
    nbytes = touched * Source(shape, dtype).expert_bytes
    roof = None if limits is None else Roofline(operations, nbytes, limits.peak[dtype], limits.bandwidth)
    made: dict[str, Any] = {
        "model": shape.name, "H": shape.H, "I": shape.I, "E": shape.E, "k": shape.k,
        "activation": shape.activation, "bias": shape.bias,
        "tokens": workload.tokens, "routing": workload.routing, "dtype": dtype,
        "touched_experts": touched, "operations": operations, "bytes": nbytes,
        "peak_gops": roof and roof.peak / 1e9, "bandwidth_gbs": roof and roof.bandwidth / 1e9,
        "roofline_ms": roof and roof.seconds * 1e3, "roofline_limit": roof and roof.limit,
        "sides": [side(result, operations, nbytes, roof) for result in results],
        "int8_over_bf16": None, "skew_cost": None,
    }  # fmt: skip
    return made | ratios(made["sides"])


def side(result: Result, operations: float, nbytes: float, roof: Roofline | None) -> dict[str, Any]:
    """Times in ms; useful GOPS; GB/s of touched weights; share of the roofline."""
    median = result.spread.median
    times = {name: value * 1e3 for name, value in asdict(result.spread).items() if name != "count"}
    check = result.check and {**asdict(result.check), "passed": result.check.passed}
    return {
        "side": result.side, "ms": times.pop("median"), **{f"{name}_ms": value for name, value in times.items()},
        "count": result.spread.count, "gops": operations / median / 1e9, "gbs": nbytes / median / 1e9,
        "roofline": roof and roof.share(median), "check": check,
    }  # fmt: skip


def ratios(sides: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast as each peer, and as the best of those whose output is right, we are (by medians)."""
    ours = next((s["ms"] for s in sides if s["side"] == OURS.name), None)
    peers = {s["side"]: s["ms"] for s in sides if s["side"] != OURS.name and s["check"] and s["check"]["passed"]}
    best = min(peers, key=peers.__getitem__) if peers else None
    return {
        "ratio": {name: ms / ours for name, ms in peers.items()} if ours else {},
        "best_peer": best,
        "ratio_to_best_peer": peers[best] / ours if best and ours else None,
    }


def our_ms(cell: dict[str, Any]) -> float | None:
    return next((s["ms"] for s in cell["sides"] if s["side"] == OURS.name), None)


def compare_dtypes(cells: list[dict[str, Any]]) -> None:
    """Fill in ``int8_over_bf16``: our BF16 time over our INT8 time, in the INT8 cells."""
    by_key = {(c["model"], c["tokens"], c["routing"], c["dtype"]): our_ms(c) for c in cells}
    for c in cells:
        int8, bf16 = (by_key.get((c["model"], c["tokens"], c["routing"], d)) for d in ("int8", "bf16"))
        if c["dtype"] == "int8" and int8 and bf16:
            c["int8_over_bf16"] = bf16 / int8
