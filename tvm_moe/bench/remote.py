"""The parent's end of a side's process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import MoEError
from . import peers
from .worker import Job, serve


class SideFailedError(MoEError):
    """A side could not do what it was asked, or its process died."""


class Remote:
    """A side running in a process of its own. Construction returns when its layers are built."""

    def __init__(self, job: Job) -> None:
        side = peers.find(job.side)
        context = multiprocessing.get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=serve, args=(child, job), daemon=True)
        with environment(dict(side.env) | {"OMP_NUM_THREADS": str(job.threads)}):
            self.process.start()
        child.close()
        try:
            self.version = self.answer()
        except SideFailedError:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any) -> Any:
        try:
            self.connection.send((method, arguments))
        except OSError:
            raise self.died() from None
        return self.answer()

    def answer(self) -> Any:
        try:
            done, value = self.connection.recv()
        except (EOFError, ConnectionError):
            raise self.died() from None
        if not done:
            raise SideFailedError(value)
        return value

    def died(self) -> SideFailedError:
        self.process.join()
        return SideFailedError(f"its process ended with exit code {self.process.exitcode}")

    def close(self) -> None:
        if self.process.is_alive():
            try:
                self.connection.send(None)
            except OSError:
                self.process.kill()
        self.process.join()
        self.connection.close()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set while a process starts, which inherits them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
