"""Covering arrays: few rows that hold every pair of values of every two factors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows ``{factor: value}``, chosen greedily and the same every time: each holds many pairs no earlier row held."""
    names, sizes = list(factors), [len(values) for values in factors.values()]
    missing = dict.fromkeys(
        pair
        for a, b in combinations(range(len(names)), 2)
        for pair in product(((a, i) for i in range(sizes[a])), ((b, j) for j in range(sizes[b])))
    )
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for factor in sorted(set(range(len(names))) - set(row), key=lambda f: -sizes[f]):
            row[factor] = max(range(sizes[factor]), key=lambda i: sum(p in missing for p in pairs(row, factor, i)))
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append({name: factors[name][row[f]] for f, name in enumerate(names)})
    return rows


def pairs(row: dict[int, int], factor: int, value: int) -> list[tuple[tuple[int, int], ...]]:
    """The pairs that ``value`` makes with what ``row`` holds already."""
    return [tuple(sorted(((factor, value), other))) for other in row.items()]
