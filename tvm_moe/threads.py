"""How many threads a call uses, and which team runs them.

Parallel regions run on the OpenMP team that torch has already started (its GOMP_parallel): a pool of our own would fight
torch's spinning threads for the cores. Affinity, thread counts and environment of the caller are read, never changed.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from .errors import MoEError, SlowPathWarning

P = ParamSpec("P")
R = TypeVar("R")
CGROUP_ROOT, CGROUP_LISTING = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
AFFINITY_SECONDS = 0.05
_explicit: int | None = None
_forked = False
_said: set[str] = set()


def set_num_threads(n: int | None) -> None:
    """Use exactly ``n`` threads from now on; None goes back to the default (torch's count, capped by what we may use)."""
    global _explicit
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 4096):
        raise MoEError(f"number of threads must be an integer from 1 to 4096 or None, got {n!r}")
    _explicit = n


def get_num_threads() -> int:
    """Threads the next call will use: the explicit number, else torch's, capped by affinity and cgroup quota."""
    if _forked:
        say("a forked child runs serially: OpenMP threads do not survive a fork (start workers with 'spawn')")
        return 1
    if team() is None:
        say("no OpenMP runtime (libgomp) in this process: running serially; import torch first or install libgomp1")
        return 1
    return _explicit or max(1, min(requested(), allowed()))


def requested() -> int:
    """torch's thread count where torch is loaded, else OMP_NUM_THREADS, else no limit."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.get_num_threads()
    value = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(value) if value.isdigit() and int(value) > 0 else sys.maxsize


_allowed, _allowed_until = 1, 0.0


def allowed() -> int:
    """CPUs that affinity and quota leave us. Affinity is asked for again after `AFFINITY_SECONDS`: every call would pay."""
    global _allowed, _allowed_until
    if (now := time.monotonic()) >= _allowed_until:
        affinity = sys.maxsize if bound() else len(os.sched_getaffinity(0))
        _allowed, _allowed_until = min(affinity, quota()), now + AFFINITY_SECONDS
    return _allowed


def bound() -> bool:
    """Whether OpenMP pins each thread of its team: the caller's own mask is then one core, and says nothing of the team."""
    binds = os.environ.get("OMP_PROC_BIND", "false").split(",")[0].strip().lower() != "false"
    return binds or any(name in os.environ for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"))


@cache
def quota() -> int:
    """CPUs the cgroup allows (cpu.max of version 2, cfs_quota of version 1), rounded up; no limit where unset."""
    limits = [sys.maxsize]
    for folder in cgroup_folders(CGROUP_LISTING):
        try:
            amount, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            try:
                amount = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            except OSError:
                continue
        if amount.isdigit() and period.isdigit() and int(period):
            limits.append(max(1, -(-int(amount) // int(period))))
    return min(limits)


def cgroup_folders(listing: Path) -> list[Path]:
    """Folders of this process's CPU cgroups, each with its parents (a quota may stand at any level)."""
    folders = []
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = CGROUP_ROOT / ("cpu" if controllers else "")
        leaf = root / path.lstrip("/")
        folders += [leaf, *(p for p in leaf.parents if p == root or root in p.parents)]
    return folders


_team: int | None = None


def team() -> int | None:
    """Address of the process's GOMP_parallel; None while no OpenMP runtime can be had.

    The symbol in the global scope is torch's libgomp, or a preloaded libiomp5, which offers the same entry point.
    """
    global _team
    if _team is None:
        for open_library in (lambda: ctypes.CDLL(None), lambda: ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)):
            try:
                _team = ctypes.cast(open_library().GOMP_parallel, ctypes.c_void_p).value
                break
            except (OSError, AttributeError):
                continue
    return _team


def say(message: str) -> None:
    """Announce a slow path once per process; `explain` lists what was said."""
    if message not in _said:
        _said.add(message)
        warnings.warn(f"tvm_moe: {message}", SlowPathWarning, stacklevel=4)


def said() -> list[str]:
    return sorted(_said)


def forked() -> bool:
    return _forked


def _after_fork() -> None:
    global _forked
    _forked = True


def fork_safe(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that call torch operations: in a forked child these run on one thread while the call lasts.

    An OpenMP region of more threads would wait forever for threads that did not survive the fork.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _forked:
            return function(*args, **kwargs)
        with torch_on_one_thread():
            return function(*args, **kwargs)

    return called


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    torch = sys.modules["torch"]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


os.register_at_fork(after_in_child=_after_fork)
