"""Other x86 CPUs, emulated by qemu-user: a wrong choice of instructions dies there of SIGILL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_moe import isa, kernels, modules

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
ROOT = Path(__file__).parent.parent
CPUS = {"Haswell": {"int8": "avx2", "bf16": "avx2"}, "Nehalem": {"int8": "generic", "bf16": "generic"}}


@pytest.mark.parametrize("cpu", CPUS)
def test_layers_on_an_older_cpu(cpu):
    if isa.machine() != "x86_64":
        pytest.skip("needs an x86-64 Python")
    if QEMU is None:
        pytest.skip("qemu-x86_64 is not installed (Debian: apt-get install qemu-user)")
    for dtype, level in CPUS[cpu].items():
        modules.find(kernels.find(level, dtype))  # built here: there it would take minutes
    done = subprocess.run(
        [QEMU, "-cpu", cpu, sys.executable, "-W", "ignore", "-m", "tests.x86_layers"],
        cwd=ROOT, env=os.environ | {"TVM_MOE_ISA": "", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == CPUS[cpu]
