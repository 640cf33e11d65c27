"""What the figures belong to: CPU, caches, memory, software, load."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from .. import isa, report
from .options import Options

FORMAT = 2  # raise when a key of the result changes its meaning
CPUS = Path("/sys/devices/system/cpu")


def stamp() -> dict[str, Any]:
    """What every result begins with."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "date": now, "command": sys.argv}


def header(options: Options, count: int) -> dict[str, Any]:
    kernels = {dtype: isa.choose(dtype, options.isa).kernel.name for dtype in options.dtypes}
    described = describe()
    return stamp() | {
        "threads": count,
        "kernels": kernels,
        "peers": list(options.peers),
        "versions": described.pop("versions"),
        "machine": described,
        "load": {"before": load(), "after": None},
        "notes": [],
        "absent": [],
        "cells": [],
    }


def describe() -> dict[str, Any]:
    """What ``tvm-moe show-config`` tells, and sizes."""
    return {
        **report.configuration(),
        "cores": os.cpu_count(),
        "l3_bytes": l3_bytes(),
        "memory_bytes": memory("MemTotal"),
        "system": platform.platform(),
    }


def l3_bytes(cpus: Path = CPUS) -> int:
    """Of all L3 caches together; 0 where the system does not tell."""
    caches = {}
    for index in cpus.glob("cpu[0-9]*/cache/index*"):
        try:
            if (index / "level").read_text().strip() == "3":
                shared = (index / "shared_cpu_list").read_text()
                caches[shared] = int((index / "size").read_text().strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(caches.values())


def memory(field: str) -> int:
    """A field of /proc/meminfo in bytes: MemTotal, MemAvailable."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def load() -> tuple[float, float, float]:
    """Runnable threads over the last 1, 5 and 15 minutes."""
    return os.getloadavg()
