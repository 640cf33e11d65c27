"""What work costs in a simulation of the driver's schedule: a plain model of one thread of a large machine.

    seconds = operations / peak + weight bytes / fair share of memory bandwidth + row bytes / cache rate + a fixed cost

An item of a GEMM does 2 * rows * columns * K operations, reads its weight panels from memory (every block of an expert
reads them anew), and moves an f32 accumulator for each row and column. Stages of rows only move what they read and
write. The terms are added: a real thread overlaps some of them, which makes all items cheaper alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..errors import MoEError
from ..kernels import MicroKernel


@dataclass(frozen=True)
class Costs:
    peak: float = 235.0  # GOPS in BF16, twice that in INT8: what a Zen 4 core was measured at
    memory: float = 5.0  # GB/s: twelve channels of DDR5-4800 shared by 96 cores
    cache: float = 20.0  # GB/s of row data: own L2 gives 50, another chiplet's caches perhaps 10
    item: float = 0.3  # microseconds: the ticket, the counters, a first miss

    @classmethod
    def parse(cls, text: str) -> Costs:
        """``"peak=235,memory=5"``; what is not named keeps its default."""
        names = [field.name for field in fields(cls)]
        wanted = f"--simulate-costs has {{!r}}, expected numbers above 0 such as {cls()}"
        given = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                given[name] = float(value)
            except ValueError:
                raise MoEError(wanted.format(part)) from None
            if name not in names or not 0 < given[name] < float("inf"):
                raise MoEError(wanted.format(part))
        return replace(cls(), **given)

    def __str__(self) -> str:
        return ",".join(f"{name}={value:g}" for name, value in vars(self).items())

    def gemm(self, kernel: MicroKernel, rows: int, panels: int, k_groups: int) -> float:
        """Seconds of an item that takes ``rows`` rows through ``panels`` panels of ``k_groups`` K groups."""
        columns, K = panels * kernel.NR, k_groups * kernel.group
        compute = 2 * rows * columns * K / (self.peak * 2e9 / kernel.weight_size)
        weights = columns * K * kernel.weight_size / (self.memory * 1e9)
        return self.item * 1e-6 + compute + weights + self.rows(4 * rows * columns)

    def rows(self, nbytes: int) -> float:
        return nbytes / (self.cache * 1e9)
