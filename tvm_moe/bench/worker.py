"""A side's process: builds its layers, then calls them when told. Weights and routing are drawn here, from seeds."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from .. import threads
from ..models import LayerShape
from . import packages, peers
from .layers import Source
from .routing import Workload
from .timing import MOST_ROUNDS, Wake


@dataclass(frozen=True)
class Job:
    """What a process is to run: the side's name, layers of a shape and dtype, how many take turns, on how many threads."""

    side: str
    shape: LayerShape
    dtype: str
    layers: int
    threads: int
    isa: str | None = None


class Host:
    """One side and its layers. Methods are what the parent may ask."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        threads.set_num_threads(job.threads)
        packages.enable()
        self.shape = job.shape
        self.adapter = peers.find(job.side).load()(Source(job.shape, job.dtype), job.isa)
        self.adapter.start()
        self.built = [self.adapter.build() for _ in range(job.layers)]
        self.layers = itertools.cycle(self.built)
        self.inputs: dict[Workload, list[tuple[Any, ...]]] = {}
        self.outputs: dict[Workload, torch.Tensor] = {}
        self.wake = Wake()

    def version(self) -> str | None:
        return packages.version(self.adapter.package)

    def prepare(self, workload: Workload) -> None:
        """Draw the routing of every call, in the dtypes the side takes."""
        hidden = workload.hidden(self.shape)
        draws = (workload.draw(self.shape, i) for i in range(MOST_ROUNDS + 1))
        self.inputs[workload] = [self.adapter.inputs(hidden, *draw) for draw in draws]
        self.touch()

    @torch.inference_mode()
    def touch(self) -> None:
        """Read every expert of every layer: a virtual machine's host takes memory away that has not been used for a while,
        and a call of few tokens would pay for the return of experts that none has met yet (3 ms instead of 1).
        """
        E, k = self.shape.E, self.shape.k
        ids = (torch.arange(-(-E // k) * k, dtype=torch.int32) % E).view(-1, k)
        inputs = self.adapter.inputs(
            torch.ones(len(ids), self.shape.H, dtype=torch.bfloat16), torch.ones(ids.shape), ids
        )
        for layer in self.built:
            self.adapter.run(layer, inputs)

    def forget(self) -> None:
        self.inputs.clear()
        self.outputs.clear()

    @torch.inference_mode()
    def call(self, workload: Workload, i: int) -> float:
        """Seconds of the i-th call, on the layer whose turn it is."""
        layer, inputs = next(self.layers), self.inputs[workload][i]
        self.wake()
        start = time.perf_counter()
        out = self.adapter.run(layer, inputs)
        taken = time.perf_counter() - start
        self.outputs[workload] = out
        return taken

    def rows(self, workload: Workload, tokens: list[int]) -> np.ndarray:
        """Some rows of what the last call of this workload gave, f32."""
        return self.outputs[workload][tokens].float().numpy()


def serve(connection: Connection, job: Job) -> None:
    """Answers (method, arguments) with (True, value) or (False, what went wrong), until it is sent None."""
    os.dup2(2, 1)  # what libraries print is not our output
    host: Host | None = None
    request: Any = ("version", ())
    while request is not None:
        try:
            host = host or Host(job)
            connection.send((True, getattr(host, request[0])(*request[1])))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {' '.join(str(error).split())}"))
        request = connection.recv()
