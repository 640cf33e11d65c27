"""The sides of the benchmark: one row each, ours first. A new peer is a file beside this one and its rows here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from ...errors import MoEError
from ...models import LayerShape
from .base import Adapter


@dataclass(frozen=True)
class Side:
    """One implementation with one setting; ``peer`` is what ``--peers`` calls it."""

    name: str
    peer: str
    adapter: str  # file here : class
    dtypes: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()  # of its process: some settings are read once

    def load(self) -> type[Adapter]:
        module, name = self.adapter.split(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)

    def usable(self, shape: LayerShape, dtype: str) -> tuple[bool, str]:
        """Whether this side can run a layer here, and why not."""
        if dtype not in self.dtypes:
            return False, f"has no {dtype} experts for x86-64 CPUs"
        adapter = self.load()
        found, reason = adapter.available()
        return adapter.supports(shape, dtype) if found else (found, reason)


OURS = Side("tvm_moe", "tvm_moe", "ours:Ours", ("int8", "bf16"))
SIDES = (
    OURS,
    Side("zentorch", "zentorch", "zentorch:Zentorch", ("int8", "bf16")),
    Side(
        "zentorch-nr64", "zentorch", "zentorch:Zentorch", ("int8", "bf16"),
        (("ZENDNNL_GRP_MATMUL_CUSTOM_KERNEL_NR", "64"),),
    ),
    Side("vllm", "vllm", "vllm:VLLM", ("bf16",)),
    Side("torch", "torch", "torch_grouped:TorchGrouped", ("bf16",)),
    Side("hf-grouped", "hf", "hf:Grouped", ("bf16",)),
    Side("hf-eager", "hf", "hf:Eager", ("bf16",)),
)  # fmt: skip
PEERS = tuple(dict.fromkeys(side.peer for side in SIDES if side is not OURS))


def find(name: str) -> Side:
    for side in SIDES:
        if side.name == name:
            return side
    raise MoEError(f"no side called {name!r}; expected one of {', '.join(side.name for side in SIDES)}")


def chosen(peers: tuple[str, ...]) -> tuple[Side, ...]:
    """Ours, and every side of the peers asked for."""
    if unknown := [p for p in peers if p not in PEERS]:
        raise MoEError(f"unknown peer {unknown[0]!r}; expected one of {', '.join(PEERS)}")
    return tuple(side for side in SIDES if side is OURS or side.peer in peers)
