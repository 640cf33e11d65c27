"""What CPU levels a test needs, the rows of the micro-kernel table as a fixture, and slow paths as errors."""

from __future__ import annotations

import os
import shutil

# Before torch is imported: its idle threads would otherwise spin, and take the cores from the tests of a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

import tvm_moe
from tests import aarch64
from tvm_moe import isa, kernels, modules


def pytest_configure(config):
    """A test in which the package falls back to a slow path fails; only building a module once is expected."""
    config.addinivalue_line("filterwarnings", "error::tvm_moe.errors.SlowPathWarning")
    config.addinivalue_line("filterwarnings", "ignore:tvm_moe. building:tvm_moe.errors.SlowPathWarning")


def pytest_runtest_setup(item):
    for marker in item.iter_markers("isa"):
        require(*marker.args)


def require(level, dtype=None):
    """Skip, with the reason, unless this CPU executes the rows of ``level`` (and ``dtype``)."""
    rows = [k for k in kernels.TABLE if k.isa == level and dtype in (None, k.dtype)]
    assert rows, f"no row of the table has the level {level!r}"
    for kernel in rows:
        runs, reason = isa.executable(kernel)
        if not runs:
            pytest.skip(f"{kernel.key}: {reason}")


def rows(*dtypes):
    """Parameters: the table's rows of these dtypes for this machine."""
    found = [k for dtype in dtypes for k in kernels.rows_for(isa.machine(), dtype)]
    return [pytest.param(k, id=k.key, marks=pytest.mark.isa(k.isa, k.dtype)) for k in found]


@pytest.fixture(params=rows(*kernels.DTYPES))
def kernel(request):
    """Every row of the table that this machine executes, one by one."""
    return request.param


@pytest.fixture(params=rows("int8"))
def int8_kernel(request):
    return request.param


@pytest.fixture(params=rows("bf16"))
def bf16_kernel(request):
    return request.param


@pytest.fixture
def set_num_threads():
    """`tvm_moe.set_num_threads`, back to the default afterwards."""
    yield tvm_moe.set_num_threads
    tvm_moe.set_num_threads(None)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A folder with the modules that every CPU of this architecture executes."""
    folder = tmp_path_factory.mktemp("built")
    rows = [kernels.rows_for(isa.machine(), dtype)[0] for dtype in kernels.DTYPES]
    for path in (modules.find_cpu(), *map(modules.find, rows)):
        for suffix in (".so", ".json"):
            shutil.copy(path.with_suffix(suffix), folder)
    return folder


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Empty folders in the look-up order: explicit, packaged, cache."""
    folders = [tmp_path / name for name in ("explicit", "packaged", "cache")]
    for folder in folders:
        folder.mkdir(mode=0o755)
    monkeypatch.setenv(modules.ENVIRONMENT, str(folders[0]))
    monkeypatch.setattr(modules, "PACKAGED", folders[1])
    monkeypatch.setattr(modules, "cache_folder", lambda: folders[2])
    return folders


@pytest.fixture(scope="session")
def aarch64_modules(tmp_path_factory):
    """A folder with the modules of every AArch64 level, as ``tvm-moe build --mtriple`` makes them."""
    from tvm_moe.compiler import build

    aarch64.require()
    folder = tmp_path_factory.mktemp("aarch64")
    try:
        build.linker("aarch64")
    except tvm_moe.ModuleError as error:
        pytest.skip(f"no AArch64 modules: {error}")
    for kernel in (k for k in kernels.TABLE if "aarch64" in k.arches):
        build.export(kernel, "aarch64", folder / modules.filename(kernel, "aarch64"))
    return folder
