"""Whole module files, as they are shipped, disassembled: nothing in them is above their level."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.disassembly import above, instructions
from tvm_moe import ModuleError, isa, kernels, modules
from tvm_moe.compiler import build
from tvm_moe.kernels import LADDER, TABLE

ALL = [pytest.param(k, arch, id=f"{arch}-{k.key}") for k in TABLE for arch in k.arches]
HIGHER = [
    pytest.param(higher, lower, arch, id=f"{arch}-{higher.key}-on-{lower.isa}")
    for arch in LADDER
    for dtype in kernels.DTYPES
    for lower, higher in pairwise(kernels.rows_for(arch, dtype))
]


@pytest.fixture(scope="session")
def code(request):
    """The instructions of a row's module file; those of this architecture come from the cache."""
    found = {}

    def of(kernel, arch):
        if (kernel, arch) not in found:
            if arch == isa.machine():
                path = modules.find(kernel)
            elif arch == "aarch64":
                path = request.getfixturevalue("aarch64_modules") / modules.filename(kernel, arch)
            else:
                pytest.skip("x86-64 modules are cross-built nowhere yet")
            found[kernel, arch] = instructions(path, arch)
        return found[kernel, arch]

    return of


@pytest.mark.parametrize(("kernel", "arch"), ALL)
def test_nothing_is_above_the_level(kernel, arch, code):
    assert len(code(kernel, arch)) > 5000
    assert above(code(kernel, arch), arch, kernel.features) == []


@pytest.mark.parametrize(("higher", "lower", "arch"), HIGHER)
def test_a_higher_level_shows(higher, lower, arch, code):
    assert above(code(higher, arch), arch, lower.features)


@pytest.mark.parametrize("arch", LADDER)
def test_the_library_that_detects_features_runs_everywhere(arch, tmp_path):
    path = tmp_path / "cpu.so"
    try:
        build.export_cpu(arch, path)
    except ModuleError as error:
        pytest.skip(str(error))
    assert above(instructions(path, arch), arch, frozenset()) == []
