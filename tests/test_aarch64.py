"""Every AArch64 level executed: real AArch64 Python, tvm_ffi and cross-built modules under qemu-user, no torch there."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from itertools import count
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from tests import aarch64
from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tests.test_packing import expected, pack_by_hand
from tests.test_serving import as_numpy
from tvm_moe import isa, kernels, wheel
from tvm_moe.emulation import python
from tvm_moe.packing import shapes
from tvm_moe.plan import LayerSizes

TOKENS = (0, 1, 2, 7, 8, 9, 64)
ROWS = [pytest.param(k, id=k.key) for dtype in kernels.DTYPES for k in kernels.rows_for("aarch64", dtype)]
SCRIPT = "import sys; from tests import aarch64_layers; aarch64_layers.main(*sys.argv[1:])"
LESS = "neoverse-n1"  # dotprod, but neither i8mm nor bf16


def cases(kernel):
    """Every token count and activation once at least; odd H and I, biases, skipped ids, both dtypes of hidden states."""
    kinds = ["int8", "bf16", "f32"] if kernel.dtype == "int8" else ["bf16", "f32"]
    for i, options in zip(count(), ACTIVATION_OPTIONS * 2, strict=False):
        if i >= 2 * len(TOKENS):
            return
        options = {name: value for name, value in options.items() if name != "interleaved"}
        H, I = ((66, 35), (130, 97), (24, 20), (1, 7))[i % 4]
        x_dtype = (torch.float32, torch.bfloat16)[i % 2]
        case = make_case(
            T=TOKENS[i % len(TOKENS)], E=5, H=H, I=I, k=3, weights=kinds[i % len(kinds)], bias=i % 3 > 0, seed=i,
            x_dtype=x_dtype, dtype=kernel.dtype, **options,
        )  # fmt: skip
        if case.ids.numel():
            case.ids[0, 0] = -1
            case.ids[-1, -1] = 5
        yield case


def packed(case, kernel):
    """A case as arrays: the layout by hand, which the module's own packing is compared with, and logical weights."""
    E, H, I = case.w13.shape[0], case.w13.shape[2], case.w2.shape[2]
    bias = "w13_bias" in case.options
    sizes = LayerSizes(E, H, I, case.spec.kind.gated, bias, bias)
    arrays = {
        n: torch.zeros(shape, dtype=dtype).numpy() for n, (shape, dtype) in shapes(kernel, sizes).items() if n[0] != "w"
    }
    data = {"kernel": kernel, "sizes": vars(sizes), "on_input": case.on_input}
    for which, w in (("13", case.w13), ("2", case.w2)):
        parts = 2 if which == "13" and sizes.gated else 1
        logical, scale = expected(w, kernel)
        data[f"w{which}"] = as_numpy(w)
        arrays[f"w{which}"] = pack_by_hand(logical, kernel, parts).view(kernel.weight)
        vectors = {kind: case.options.get(f"w{which}_{kind}") for kind in ("scale", "bias")}
        vectors["scale"] = vectors["scale"] if scale is None else scale
        for kind, vector in vectors.items():
            if vector is not None:
                arrays[f"{kind}{which}"] = np.ascontiguousarray(
                    pack_by_hand(vector[..., None].numpy(), kernel, parts)[:, :, 0, :, 0]
                )
    options = {"name": case.spec.name} | {n: case.options.get(n) for n in ("alpha", "limit")}
    inputs = {"x": as_numpy(case.x), "weights": case.weights.numpy(), "ids": case.ids.numpy()}
    return data | inputs | {"arrays": arrays, "activation": options}


def serve(layers, aarch64_modules, tmp_path, level="", cpu="max"):
    """What the AArch64 process makes of them, and what it says."""
    file = tmp_path / "layers.pickle"
    file.write_bytes(pickle.dumps(layers))
    done = aarch64.execute(SCRIPT, str(file), level, cpu=cpu, TVM_MOE_MODULES=str(aarch64_modules))
    assert done.returncode == 0, done.stderr
    return pickle.loads(file.with_suffix(".out").read_bytes()), json.loads(done.stdout)


@pytest.mark.parametrize("kernel", ROWS)
def test_whole_layers(kernel, aarch64_modules, tmp_path):
    made = list(cases(kernel))
    got, _ = serve([packed(case, kernel) for case in made], aarch64_modules, tmp_path, kernel.isa)
    for case, result in zip(made, got, strict=True):
        y = torch.from_numpy(result)
        y = y.view(torch.bfloat16) if case.x.dtype == torch.bfloat16 else y
        assert_matches_reference(y, case)
        best = isa.choose(kernel.dtype).kernel
        if kernel.dtype == "int8" and best.fused and kernel.fused:
            assert torch.equal(y, case.run(case.pack(best))), "INT8 is not that of x86 bit for bit"


@pytest.mark.parametrize(("cpu", "level"), [("max", "i8mm_bf16"), (LESS, "dotprod"), ("cortex-a53", "generic")])
def test_dispatch(cpu, level, aarch64_modules, tmp_path):
    kernel = kernels.find(level, "int8")
    case = make_case(T=9, E=5, H=66, I=35, k=3, dtype="int8", x_dtype=torch.float32)
    (got,), said = serve([packed(case, kernel)], aarch64_modules, tmp_path, cpu=cpu)
    assert kernel.features <= set(said["features"])
    assert_matches_reference(torch.from_numpy(got), case)


def test_the_wheel_serves(aarch64_modules, tmp_path):
    """Unpacked beside its dependencies, as pip would; the checkout and other folders of modules are out of reach."""
    checkout, unpacked = tmp_path / "checkout", tmp_path / "unpacked"
    checkout.mkdir()
    shutil.copytree(aarch64_modules, wheel.copy_checkout(checkout))
    made = wheel.pack(checkout, wheel.platform(aarch64_modules, "aarch64"), tmp_path)
    assert made.name.endswith("_aarch64.whl")
    ZipFile(made).extractall(unpacked)
    case, file = make_case(T=9, E=5, H=66, I=35, k=3, dtype="bf16", x_dtype=torch.float32), tmp_path / "layers.pickle"
    file.write_bytes(pickle.dumps([packed(case, kernels.find("i8mm_bf16", "bf16"))]))
    script = Path(__file__).with_name("aarch64_layers.py").read_text()
    path = os.pathsep.join([str(python.installed()[1]), str(unpacked)])
    done = aarch64.execute(script, str(file), "", PYTHONPATH=path, PYTHONSAFEPATH="1")  # not the checkout it stands in
    assert done.returncode == 0, done.stderr
    (got,) = pickle.loads(file.with_suffix(".out").read_bytes())
    assert_matches_reference(torch.from_numpy(got), case)


def test_demanding_what_the_cpu_lacks_is_an_error(aarch64_modules, tmp_path):
    code = "from tvm_moe import isa; isa.choose('int8', 'i8mm_bf16')"
    done = aarch64.execute(code, cpu=LESS, TVM_MOE_MODULES=str(aarch64_modules))
    assert done.returncode == 1
    assert "UnsupportedISAError" in done.stderr
    assert "i8mm" in done.stderr.splitlines()[-1]
