"""What the benchmark asks of a side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar

from torch import Tensor

from ...models import LayerShape
from .. import packages
from ..layers import Source


class Adapter(ABC):
    """One implementation in one process. See `checks` for ``noise_factor`` and ``roundings``."""

    package: ClassVar[str]  # the distribution it needs
    # Places that store a result in bf16: gate, up, activation, down projection, weighting, sum of the slots.
    roundings: ClassVar[int] = 6
    noise_factor: ClassVar[float] = 2

    def __init__(self, source: Source, isa: str | None = None) -> None:
        self.source, self.isa = source, isa

    @classmethod
    def available(cls) -> tuple[bool, str]:
        """Whether it can run on this machine, or the reason why not. Imports nothing."""
        if packages.version(cls.package) is None:
            return False, f"{cls.package} is not installed; {packages.advice(cls.package)}"
        return True, ""

    @classmethod
    def supports(cls, shape: LayerShape, dtype: str) -> tuple[bool, str]:
        return True, ""

    def start(self) -> None:  # noqa: B027  (most need nothing)
        """Load libraries; runs once, before anything is built."""

    @abstractmethod
    def build(self) -> Any:
        """One layer in the form this side keeps it, all preparation done."""

    @abstractmethod
    def inputs(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> tuple[Any, ...]:
        """bf16 [T, H], f32 [T, k], int32 [T, k] in the dtypes this side takes; not timed."""

    @abstractmethod
    def run(self, layer: Any, inputs: tuple[Any, ...]) -> Tensor:
        """The timed call: output [T, H]."""


def activation(shape: LayerShape, names: Collection[str]) -> tuple[bool, str]:
    """`supports` of a side that has the activations ``names``."""
    return shape.activation in names, f"has no activation {shape.activation}"
