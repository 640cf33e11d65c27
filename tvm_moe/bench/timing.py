"""Turns: every side calls once a round, in an order that rotates, until a budget of time is used up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

# A thread team spins 4 to 8 milliseconds after its last region and would take the cores from the next process; after vLLM's
# calls, 10 were not enough (3 ms instead of 1.1 for whoever came next).
SETTLE_SECONDS = 0.03
MOST_ROUNDS = 48
WAKE_SECONDS, MOST_WAKE_SECONDS = 0.0005, 0.05

Turn = TypeVar("Turn", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Median, quartiles, extremes and number of repeated times in seconds."""

    median: float
    q1: float
    q3: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median, q1, q3, min(values), max(values), len(values))


class Wake:
    """An operator of torch before every call, as in a model: clocks are up, and the thread team is awake.

    Until it is as fast as it has been: a system that has put two threads on one core takes some milliseconds to notice,
    and a call would last a time slice (4 ms) longer, on any side.
    """

    def __init__(self) -> None:
        self.values, self.least = torch.zeros(1 << 18), float("inf")

    def __call__(self) -> None:
        start, taken = time.perf_counter(), float("inf")
        while (now := time.perf_counter()) < start + WAKE_SECONDS or (
            taken > 3 * self.least and now < start + MOST_WAKE_SECONDS
        ):
            self.values.add_(1)
            taken = time.perf_counter() - now
            self.least = min(taken, self.least)


def rounds(
    turns: Sequence[Turn], call: Callable[[Turn, int], float | None], budget: float, fewest: int
) -> dict[Turn, list[float]]:
    """``call(turn, i)`` gives the seconds of the i-th call, or None where the side has failed: it then leaves the game.

    Round 0 warms up, twice, and tells how many rounds fit ``budget`` seconds.
    """
    first = {turn: call(turn, 0) for turn in turns for _ in range(2)}
    times: dict[Turn, list[float]] = {turn: [] for turn in turns if first[turn] is not None}
    cost = sum(seconds or 0 for seconds in first.values()) + SETTLE_SECONDS * len(turns)
    for i in range(1, 1 + min(MOST_ROUNDS, max(fewest, int(budget / cost)))):
        for turn in rotated(list(times), i):
            time.sleep(SETTLE_SECONDS)
            seconds = call(turn, i)
            if seconds is None:
                del times[turn]
            else:
                times[turn].append(seconds)
    return times


def rotated(items: list[Turn], by: int) -> list[Turn]:
    by %= max(1, len(items))
    return items[by:] + items[:by]
