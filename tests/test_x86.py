"""Other x86 CPUs, emulated by qemu-user: a wrong choice of instructions dies there of SIGILL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_moe import demo, isa, kernels, modules

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
ROOT = Path(__file__).parent.parent
# No Skylake-X: qemu 7.2 translates no AVX-512, and its -cpu Skylake-Server shows none; CPUs that have it run the level in
# all tests that take a `kernel`.
CPUS = {"Haswell": {"int8": "avx2", "bf16": "avx2"}, "Nehalem": {"int8": "generic", "bf16": "generic"}}


def emulated(cpu, *command):
    """What Python says on that CPU; it has the modules it should want, which would take minutes to build there."""
    if isa.machine() != "x86_64":
        pytest.skip("needs an x86-64 Python")
    if QEMU is None:
        pytest.skip("qemu-x86_64 is not installed (Debian: apt-get install qemu-user)")
    for dtype, level in CPUS[cpu].items():
        modules.find(kernels.find(level, dtype))
    done = subprocess.run(
        [QEMU, "-cpu", cpu, sys.executable, "-W", "ignore", "-m", *map(str, command)],
        cwd=ROOT, env=os.environ | {"TVM_MOE_ISA": "", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("cpu", CPUS)
def test_layers_on_an_older_cpu(cpu):
    assert json.loads(emulated(cpu, "tests.x86_layers").splitlines()[-1]) == CPUS[cpu]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """What scripts/demo runs."""
    folder = tmp_path_factory.mktemp("demo")
    return {dtype: demo.make_checkpoint(folder / dtype, dtype) for dtype in kernels.DTYPES}


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("cpu", CPUS)
def test_the_main_job_on_an_older_cpu(cpu, dtype, checkpoints, tmp_path):
    """From the command to the report: the CPU's own level served, and well enough to pass."""
    report = tmp_path / "report.json"
    emulated(cpu, "tvm_moe", "run", checkpoints[dtype], "--layers", "0", "--tokens", "9", "--json", report)
    said = json.loads(report.read_text())
    assert said["passed"]
    assert [(layer["dtype"], layer["isa"]) for layer in said["layers"]] == [(dtype, CPUS[cpu][dtype])]
