"""Serving needs apache-tvm-ffi alone: layers without apache-tvm, with its oldest and newest versions, without torch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import make_case
from tvm_moe import isa, kernels

ROOT = Path(__file__).parent.parent
VERSIONS = ["==0.1.9", "==0.1.11", "<0.2"]  # the least that pyproject.toml allows, what vLLM 0.33 pins, the newest
SIZES = {"T": 9, "H": 66, "I": 35, "bias": True}


def target(version):
    """A folder, kept in the user's cache, with this version of apache-tvm-ffi and nothing else."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvm_moe-tests"
    folder = base / f"apache-tvm-ffi{version}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / "tvm_ffi").is_dir():
        base.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--retries", "1", "--target"]
        done = subprocess.run([*command, str(folder), f"apache-tvm-ffi{version}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"pip cannot install apache-tvm-ffi{version}: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module", params=[None, *VERSIONS], ids=lambda v: v or "installed")
def path(request):
    """PYTHONPATH of a serving process."""
    return os.pathsep.join([*([str(target(request.param))] if request.param else []), str(ROOT)])


START = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
BLOCKED = set(sys.argv[2].split(","))
sys.meta_path.insert(0, Block())
import pickle, tvm_ffi
import numpy as np
layers = pickle.load(open(sys.argv[1], "rb"))
"""

PUBLIC = """
import tvm_moe
from tests.helpers import make_case
for kernel, options, want in layers:
    case = make_case(**options)
    got = tvm_moe.fused_moe(case.x, case.pack(kernel), case.weights, case.ids)
    assert np.array_equal(got.float().numpy(), want), kernel
"""

CORE = """
from tvm_moe import activations, isa, plan, runtime

class Foreign:  # nothing but what the DLPack protocol asks for
    def __init__(self, array):
        self.array = array
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

for kernel, data, want in layers:
    assert isa.executable(kernel)[0]
    arrays = {name: Foreign(a) if name.startswith("w") else a for name, a in data["arrays"].items()}
    layer = runtime.Layer(kernel, plan.LayerSizes(**data["sizes"]), activations.resolve("silu"), arrays)
    got = np.full_like(data["x"], 7)
    layer.run(data["x"], got, data["weights"], data["ids"])
    assert np.array_equal(got, want), kernel
    got.fill(7)
    layer.run(*(tvm_ffi.from_dlpack(a) for a in (data["x"], got, data["weights"], data["ids"])))
    assert np.array_equal(got, want), kernel
"""

END = """
assert not BLOCKED & set(sys.modules)
print("equal", len(layers), tvm_ffi.__file__)
"""


def serve(script, layers, blocked, path, tmp_path):
    """Run ``script`` in a process that cannot import ``blocked``; it must use the tvm_ffi that comes first in ``path``."""
    file = tmp_path / "layers.pickle"
    file.write_bytes(pickle.dumps(layers))
    command = [sys.executable, "-c", START + script + END, str(file), blocked]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.startswith(f"equal {len(layers)} "), done.stderr
    first = path.split(os.pathsep)[0]
    expected = Path(first) if first != str(ROOT) else Path(sys.modules["tvm_ffi"].__file__).parent.parent
    assert Path(done.stdout.split()[2]).parent.parent == expected


def executable():
    return [k for k in kernels.TABLE if isa.executable(k)[0]]


def test_layers_without_apache_tvm(path, tmp_path):
    """Packing and calling every kernel gives, bit for bit, what this process gives."""
    layers = []
    for kernel in executable():
        options = SIZES | {"dtype": kernel.dtype}
        case = make_case(**options)
        layers.append((kernel, options, case.run(case.pack(kernel)).float().numpy()))
    serve(PUBLIC, layers, "tvm", path, tmp_path)


def as_numpy(array):
    return array.view(torch.uint16).numpy() if array.dtype == torch.bfloat16 else array.numpy()


def core_data(kernel, x_dtype):
    """A packed layer and a call of it in numpy arrays, uint16 holding bf16; and its result."""
    case = make_case(**SIZES, x_dtype=x_dtype, dtype=kernel.dtype)
    packed = case.pack(kernel)
    arrays = {name: as_numpy(array) for name, array in packed.layer.arrays.items()}
    inputs = {"x": as_numpy(case.x), "weights": case.weights.numpy(), "ids": case.ids.numpy()}
    return {"arrays": arrays, "sizes": vars(packed.layer.sizes), **inputs}, as_numpy(case.run(packed))


def test_the_core_without_torch(path, tmp_path):
    layers = [(k, *core_data(k, x_dtype)) for k in executable() for x_dtype in (torch.bfloat16, torch.float32)]
    serve(CORE, layers, "tvm,torch", path, tmp_path)


def test_importing_the_package_imports_neither(tmp_path):
    script = "import tvm_moe\nfrom tvm_moe import errors, isa, kernels, modules, plan, runtime, threads"
    serve(script, [], "tvm,torch", str(ROOT), tmp_path)


def test_numpy_rows_with_a_stride(kernel):
    data, want = core_data(kernel, torch.float32)
    layer = make_case(**SIZES, x_dtype=torch.float32, dtype=kernel.dtype).pack(kernel).layer
    wide_x, wide_out = np.zeros((9, 100), np.float32), np.full((9, 80), 7, np.float32)
    wide_x[:, 5:71] = data["x"]
    layer.run(wide_x[:, 5:71], wide_out[:, 3:69], data["weights"], data["ids"])
    assert np.array_equal(wide_out[:, 3:69], want)
    assert (wide_out[:, :3] == 7).all()
    assert (wide_out[:, 69:] == 7).all()


def test_the_serving_half_does_not_name_the_compiler():
    package = ROOT / "tvm_moe"
    lines = [line for p in [*package.glob("*.py"), *(package / "checkpoint").glob("*.py")] for line in p.open()]
    assert [
        line for line in lines if line.startswith(("import tvm\n", "from tvm ", "from tvm.", "from .compiler"))
    ] == []
