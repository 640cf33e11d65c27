"""Executed instructions of marked regions of a program: exact and repeatable, where times under emulation mean nothing."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EmulationError
from . import plugin, python
from .classes import count

MODULE = f"{__package__}.guest"
Region = tuple[int, dict[str, int]]  # its number, and how often instructions of each class were executed


class Guest:
    """An emulated Python that does what `guest` can; one thread. Close it, or use it as a context manager."""

    def __init__(self, **environment: str) -> None:
        python.qemu(plugins=True)
        self.folder = tempfile.TemporaryDirectory(prefix="tvm_moe-guest-")
        self.blocks, self.errors = Path(self.folder.name, "blocks"), Path(self.folder.name, "errors")
        self.read = 0
        command = python.command("-m", MODULE, plugin=f"{plugin.build_into(Path(self.folder.name))},out={self.blocks}")
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=python.environment(OMP_NUM_THREADS="1", **environment),
                start_new_session=True,  # an interrupt is for us, who then close it; without us it reads the end of its jobs
            )  # fmt: skip

    def regions(self, what: str, **job: Any) -> list[Region]:
        """Let it do ``what``; the regions that it marks, in order."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps({"what": what, **job}), file=self.process.stdin, flush=True)
            ready, _, _ = select.select([self.process.stdout], [], [], python.TIMEOUT_SECONDS)
        except BrokenPipeError:
            ready = [self.process.stdout]
        if not ready or not self.process.stdout.readline():
            last = self.errors.read_text().strip().splitlines()[-1:]
            self.close()
            raise EmulationError(f"the emulated program {'failed' if ready else 'hangs'}: {' '.join(last)}")
        with self.blocks.open("rb") as file:
            file.seek(self.read)
            data = file.read()
        self.read += len(data)
        return list(parsed(data))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parsed(data: bytes) -> Iterator[Region]:
    """The regions that the plugin wrote, see `plugin`."""
    at, blocks = 0, []
    while at < len(data):
        times, n = (int(v) for v in np.frombuffer(data, np.int64, 2, at))
        at += 16
        if n:
            blocks.append((times, np.frombuffer(data, np.uint32, n, at)))
            at += 4 * n
        else:
            yield times, count(blocks)
            blocks = []
