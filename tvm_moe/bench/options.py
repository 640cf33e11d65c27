"""What a run of the benchmark is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import MoEError
from ..kernels import DTYPES
from ..models import LayerShape
from .costs import Costs

TOKENS, QUICK_TOKENS = (1, 16, 64, 256, 1024), (1, 16, 256)
SIMULATED_TOKENS, BESIDE_TOKENS = (1024,), (16, 256)
BUDGET, QUICK_BUDGET = 4.0, 1.0  # seconds of calls a cell, all sides together
FEWEST_ROUNDS, QUICK_ROUNDS = 7, 5
MOST_THREADS = 4096  # as `set_num_threads` allows


@dataclass(frozen=True)
class Options:
    shapes: tuple[LayerShape, ...]
    dtypes: tuple[str, ...] = DTYPES
    tokens: tuple[int, ...] = TOKENS
    routings: tuple[str, ...] = ("uniform",)
    peers: tuple[str, ...] = ()
    threads: int | None = None
    isa: str | None = None
    budget: float = BUDGET
    fewest_rounds: int = FEWEST_ROUNDS
    rotation_bytes: int = 256 << 20  # of weights at least, see `layers`
    stream_bytes: int = 512 << 20  # that the bandwidth probe reads
    pack: bool = False
    overheads: bool = False
    beside_torch: bool = False  # in place of all these
    arm_instructions: bool = False  # in place of everything, and so are these
    simulate_threads: tuple[int, ...] = ()
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        if unknown := set(self.dtypes) - set(DTYPES):
            raise MoEError(f"unknown dtype {min(unknown)!r}; expected one of {', '.join(DTYPES)}")
        if min(self.tokens, default=0) < 1:
            raise MoEError(f"token counts must be at least 1, got {self.tokens}")
        if not all(1 <= n <= MOST_THREADS for n in self.simulate_threads):
            raise MoEError(f"--simulate-threads must be from 1 to {MOST_THREADS}, got {self.simulate_threads}")


def shape(text: str) -> LayerShape:
    """``"H,I,E,k"``."""
    try:
        H, I, E, k = map(int, text.split(","))
    except ValueError:
        raise MoEError(f"--shape is {text!r}, expected four numbers H,I,E,k such as 2048,768,128,8") from None
    if min(H, I, k) < 1 or k > E or max(H, I, E) >= 2**31:
        raise MoEError(f"--shape is {text!r}; expected positive numbers below 2^31 with k at most E")
    return LayerShape(f"{H},{I},{E},{k}", H, I, E, k)
