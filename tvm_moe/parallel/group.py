"""What a parallel layer needs of torch.distributed: ranks that agree, and errors that say what broke."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor

from .. import api
from ..errors import MoEError

P = ParamSpec("P")
NUMBERS = ("k", "dtype", "tokens")  # of a call, that ranks have in common
ProcessGroup = dist.ProcessGroup


class Group:
    """This process among those that share a layer. Its methods are called by all of them, in the same order.

    A rank that has died, or that does not come within the group's timeout, is a MoEError on all that wait for it.
    """

    def __init__(self, group: ProcessGroup | None, layer: str) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise MoEError(f"{layer} needs processes: call torch.distributed.init_process_group('gloo', ...) first")
        self.group, self.layer = group, layer
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise MoEError(
                f"{layer}: this process (rank {dist.get_rank()}) is not in the group; make it on members only"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def share(self, n: int) -> range:
        """This rank's of n things: consecutive, and as many as the other ranks' or one more."""
        return range(self.rank * n // self.size, (self.rank + 1) * n // self.size)

    @contextmanager
    def reported(self, exchange: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what torch.distributed raises, whatever the backend
            raise MoEError(
                f"{self.layer}: {exchange} failed on rank {self.rank} of {self.size} ({str(error).splitlines()[0]}); another "
                f"rank may have died, or not have come within the group's timeout: see what it printed, start all ranks again"
            ) from error

    def gather(self, value: Any) -> list[Any]:
        """A small value of every rank, by rank."""
        values: list[Any] = [None] * self.size
        with self.reported("the comparison of ranks"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what a rank does on its own: if one fails, all do, instead of waiting for it."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise MoEError(f"{self.layer}: rank {rank} failed: {failure}")

    def same(self, described: dict[str, Any]) -> dict[str, Any]:
        """What all ranks say of the layer together (each may leave things out); where two differ, all raise."""
        known: dict[str, tuple[int, Any]] = {}
        for rank, given in enumerate(self.gather(described)):
            for name, value in given.items():
                first, expected = known.setdefault(name, (rank, value))
                if value != expected:
                    raise MoEError(
                        f"{self.layer}: {name} is {expected!r} on rank {first} and {value!r} on rank {rank}; every rank "
                        f"must hold a part of the same layer"
                    )
        return {name: value for name, (_, value) in known.items()}

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The first ``sent[0]`` rows go to rank 0, the next ``sent[1]`` to rank 1; what comes is in the order of ranks."""
        out = rows.new_empty(sum(received), *rows.shape[1:])
        with self.reported("all_to_all"):
            dist.all_to_all_single(out, rows, received, sent, group=self.group)
        return out

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """In place; of nothing, which all ranks then have, without an exchange."""
        if values.numel():
            with self.reported("all_reduce"):
                dist.all_reduce(values, op, group=self.group)
        return values

    def announce(self, rows: list[int]) -> list[int]:
        """How many rows each rank is about to send, after telling each the same."""
        ones = [1] * self.size
        return self.all_to_all(torch.tensor(rows, device="cpu"), ones, ones).tolist()

    def agree(self, error: MoEError | None, numbers: dict[str, int]) -> None:
        """Before a call's exchanges: no rank's arguments are refused (``error``) and ``numbers`` are the same, or all raise.

        A rank that went on alone would meet the others' exchange in its next call.
        """
        own = list(numbers.values())
        told = torch.tensor([int(error is not None), *own, *(-n for n in own)], device="cpu")
        refused, *found = self.all_reduce(told, dist.ReduceOp.MAX).tolist()
        if error is not None:
            raise error
        if refused:
            raise MoEError(f"{self.layer}: another rank's call was refused, so that none can be served; see its error")
        for name, most, least in zip(numbers, found, found[len(own) :], strict=False):
            if most != -least:
                low, high = (api.IO_DTYPES[n] if name == "dtype" else n for n in (-least, most))
                raise MoEError(
                    f"{self.layer}: {name} is {low} on one rank and {high} on another; all must call with the same"
                )


def uncompiled(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A graph break under torch.compile, which would round in other places, and without gradients.

    `torch.compiler.disable` at once would import the compiler wherever this is imported, which takes seconds.
    """
    forward = torch.no_grad()(forward)

    @wraps(forward)
    def called(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(forward)(*args, **kwargs)
        return forward(*args, **kwargs)

    return called


def prepared(
    group: Group, x: Tensor, weights: Tensor, ids: Tensor, hidden_size: int, on_input: bool, same_tokens: bool
) -> tuple[Tensor, Tensor]:
    """``x`` and f32 ``weights`` of a checked call, after all ranks have agreed to it.

    Where the weights multiply the input, x has taken them, and ones remain.
    """
    numbers = dict.fromkeys(NUMBERS, 0)
    refused = None
    try:
        api.check_tensors(x, weights, ids, hidden_size, on_input)
        found = ids.shape[1], api.IO_DTYPES.index(x.dtype), same_tokens * len(x)
        numbers = dict(zip(NUMBERS, found, strict=True))
    except MoEError as error:
        refused = error
    group.agree(refused, numbers)
    x, weights = x.detach().resolve_neg(), weights.detach().resolve_neg().float()
    return (x.float() * weights, torch.ones_like(weights)) if on_input else (x, weights)
