"""Other x86 CPUs, emulated by qemu-user: a wrong choice of instructions dies there of SIGILL."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.processes import said
from tvm_moe import demo, isa, kernels, modules

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
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
    return said(*command, under=(QEMU, "-cpu", cpu))


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
    written = json.loads(report.read_text())
    assert written["passed"]
    assert [(layer["dtype"], layer["isa"]) for layer in written["layers"]] == [(dtype, CPUS[cpu][dtype])]
