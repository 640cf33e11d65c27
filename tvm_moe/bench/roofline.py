"""The least time a call can take on this machine, from what the probes measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the probes reached: operations a second by dtype, and bytes a second read from memory."""

    peak: dict[str, float]
    bandwidth: float


@dataclass(frozen=True)
class Roofline:
    """``operations`` at ``peak`` a second, and ``nbytes`` of touched expert weights at ``bandwidth`` a second."""

    operations: float
    nbytes: float
    peak: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        return max(self.operations / self.peak, self.nbytes / self.bandwidth)

    @property
    def limit(self) -> str:
        return "compute" if self.operations / self.peak >= self.nbytes / self.bandwidth else "memory"

    def share(self, seconds: float) -> float:
        """Of the roofline that a call of ``seconds`` reaches; 1 is the limit."""
        return self.seconds / seconds
