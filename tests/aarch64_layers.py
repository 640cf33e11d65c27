"""Runs under an AArch64 Python, without torch and apache-tvm: packs and calls the layers of a file, checks the tiles' sums.

Usage: aarch64_layers.py FILE.pickle LEVEL; "" is the level that the CPU gets. Results go to FILE.out.
"""

import ctypes
import json
import pickle
import sys
from pathlib import Path

import numpy as np

from tvm_moe import activations, isa, plan, runtime
from tvm_moe.accumulators import check_all_accumulators
from tvm_moe.plan import Matrix

SOURCES = {"uint16": 0, "float32": 1, "int8": 2}


def pack(module, kernel, sizes, w, which, want):
    """The module's own packing of one layer's matrices [E, N, K]; equal to ``want`` element by element."""
    half, valid = (sizes.half(kernel), sizes.intermediate) if which == "13" else (kernel.NR, sizes.hidden)
    out = np.empty_like(want)
    E, panels, groups, NR, _ = want.shape
    start, scale = np.zeros((E, panels, NR), np.int32), np.zeros((E, panels, NR), np.float32)
    values = np.zeros((E, len(Matrix)), np.int64)
    for e in range(E):
        at = values[e].ctypes.data
        fields = {
            Matrix.SOURCE: SOURCES[str(w.dtype)], Matrix.N_STRIDE: w.shape[2], Matrix.K: w.shape[2],
            Matrix.ROW_STEP: 1, Matrix.PART_STEP: valid if sizes.gated and which == "13" else 0,
            Matrix.VALID: valid, Matrix.HALF: half, Matrix.PANELS: panels, Matrix.GROUPS: groups,
            Matrix.AT_FROM: w[e].ctypes.data - at, Matrix.AT_PACKED: out[e].ctypes.data - at,
            Matrix.AT_START: start[e].ctypes.data - at, Matrix.AT_SCALE: scale[e].ctypes.data - at,
        }  # fmt: skip
        values[e] = [fields[f] for f in Matrix]
    temp = np.empty(2 * plan.pack_temp_bytes(kernel), np.uint8)
    module.pack(ctypes.c_void_p(values.ctypes.data), E, ctypes.c_void_p(temp.ctypes.data), 2)
    assert np.array_equal(out, want), (kernel.key, which, "packed otherwise")
    return out


def layer(case, kernel, module):
    sizes = plan.LayerSizes(**case["sizes"])
    arrays = dict(case["arrays"])
    for which in ("13", "2"):
        arrays[f"w{which}"] = pack(module, kernel, sizes, case[f"w{which}"], which, arrays[f"w{which}"])
    return runtime.Layer(kernel, sizes, activations.resolve(**case["activation"]), arrays)


def main(path, level):
    cases, results = pickle.loads(Path(path).read_bytes()), []
    for case in cases:
        kernel = isa.choose(case["kernel"].dtype, level or None).kernel
        assert kernel == case["kernel"], f"{kernel.key} was chosen, not {case['kernel'].key}"
        module = runtime.load(kernel)
        got = np.full_like(case["x"], 7)
        layer(case, kernel, module).run(case["x"], got, case["weights"], case["ids"], case["on_input"], module)
        results.append(got)
    failed = [c.what for c in check_all_accumulators(module, kernel) if not c.passed]
    assert not failed, failed
    assert not {"torch", "tvm"} & set(sys.modules)
    Path(path).with_suffix(".out").write_bytes(pickle.dumps(results))
    print(json.dumps({"features": sorted(isa.features()), "threads": module.threads()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
