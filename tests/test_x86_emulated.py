"""Levels whose instructions this CPU lacks, executed here: a handler of SIGILL does what the instruction would."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch

from tests import vnni_layers
from tests.amx_layers import PANEL_ROWS
from tests.processes import ROOT, said
from tvm_moe import PackedExperts, UnsupportedISAError, isa, kernels, modules
from tvm_moe.compiler.intrin import tile_registers


def emulator(source, folder):
    """The library of one of the emulators here."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if isa.machine() != "x86_64" or compiler is None:
        pytest.skip("needs an x86-64 CPU and a C compiler")
    made = folder / "emulator.so"
    options = ["-x", "c", "-O2", "-shared", "-fPIC", ROOT / "tests" / source, "-o", made, "-lm"]
    subprocess.run([compiler, *options], check=True)
    return str(made)


def emulated(script, emulated_features, kernel_rows, *arguments):
    """What ``script`` prints; its instructions must be all that this CPU lacks."""
    for kernel in kernel_rows:
        if missing := (kernel.features - emulated_features) - isa.features():
            pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
        if isa.executable(kernel)[0]:
            pytest.skip(f"this CPU executes {kernel.isa} itself: test_layer runs it")
        modules.find(kernel)
    return json.loads(said(script, *arguments).splitlines()[-1])


@pytest.mark.parametrize(("level", "which"), [("avxvnni", 0), ("avxvnniint8", 1)])
def test_layers_on_a_level_that_this_cpu_lacks(level, which, tmp_path):
    """Exact accumulators and whole layers; only the intended instruction was executed, and often.

    What was packed and saved there is packed again where it is loaded, and refused where its level is demanded.
    """
    library, path = emulator("vnni_emulator.c", tmp_path), tmp_path / "layer.safetensors"
    counts = emulated("tests.vnni_layers", {level}, [kernels.find(level, "int8")], level, library, str(path))
    assert counts[which] > 1000
    assert counts[1 - which] == 0
    case, loaded = vnni_layers.stored_case(), PackedExperts.load(path)
    assert loaded.isa == isa.choose("int8").kernel.isa
    assert torch.equal(case.run(loaded), case.run(case.pack()))
    with pytest.raises(UnsupportedISAError, match=f"isa='{level}' needs the CPU feature {level}"):
        PackedExperts.load(path, level)


@pytest.fixture(scope="module")
def amx_executed(tmp_path_factory):
    """What tests.amx_layers executed, step by step."""
    folder, rows = tmp_path_factory.mktemp("amx"), [kernels.find("amx", dtype) for dtype in kernels.dtypes_of("amx")]
    return emulated("tests.amx_layers", isa.AMX, rows, emulator("amx_emulator.c", folder), str(folder))


THREAD = {"configured": 1, "released": 1}


@pytest.mark.parametrize("dtype", kernels.dtypes_of("amx"))
def test_a_panel_executes_the_products_it_needs(dtype, amx_executed):
    """Three K steps: one load a product of 2x2 tiles, five for four of 1x4; start values and sums once a tile."""
    one_row, two_rows = (amx_executed.get(f"{dtype}, {n} rows") for n in (1, 2))
    sixteen = THREAD | {"loaded": 4 + 3 * 5, "stored": 4, dtype: 3 * 4}
    few = sixteen | {"reshaped": 1}
    whole = THREAD | {"loaded": 8 + 3 * 8, "stored": 8, dtype: 3 * 8, "rows multiplied": 3 * 4 * 32}
    assert amx_executed[f"{dtype}, 32 rows"] == whole
    assert amx_executed[f"{dtype}, 16 rows"] == sixteen | {"rows multiplied": 3 * 4 * 16}
    for n, got in (1, one_row), (2, two_rows):
        assert got == (THREAD if dtype == "int8" else few | {"rows multiplied": 3 * 4 * n})


@pytest.mark.parametrize("dtype", kernels.dtypes_of("amx"))
def test_no_row_is_multiplied_in_vain(dtype, amx_executed):
    """Tiles are shaped for the rows there are, and shaped anew only where the next tile has others."""
    few = kernels.find("amx", dtype).few
    for n in PANEL_ROWS:
        if few and n <= few.MR:
            continue
        counts = amx_executed[f"{dtype}, {n} rows"]
        assert counts["rows multiplied"] == 3 * 4 * n
        assert counts[dtype] == 3 * 4 * -(-n // tile_registers.ROWS)
        assert counts.get("reshaped", 0) == int(n % tile_registers.ROWS > 0)


@pytest.mark.parametrize("dtype", kernels.dtypes_of("amx"))
def test_amx_layers(dtype, amx_executed):
    """Exact accumulators and whole layers, on two threads; every thread that took tiles gave them back."""
    counts = amx_executed[f"{dtype}, layers"]
    assert counts[dtype] > 1000
    assert counts["configured"] == counts["released"] > 50
    assert counts.keys() == {"configured", "reshaped", "released", "loaded", "stored", dtype, "rows multiplied"}
    measured = amx_executed[f"{dtype}, probe and tasks"]
    assert measured["configured"] == measured["released"]
    assert measured[dtype] > 1000
