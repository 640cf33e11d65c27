"""The emulated AArch64 Python in tests: where it cannot be had, they skip with the reason."""

from __future__ import annotations

import subprocess

import pytest

from tvm_moe.emulation import python
from tvm_moe.errors import EmulationError


def require(plugins: bool = False) -> None:
    """``plugins``: a qemu that counts, too."""
    try:
        python.installed()
        python.qemu(plugins)
    except EmulationError as error:
        pytest.skip(str(error))


def execute(script: str, *arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    require()
    return python.execute(script, *arguments, **options)
