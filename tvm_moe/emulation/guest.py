"""What runs in the emulated Python: calls whose instructions are counted. No torch and no compiler there."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tvm_moe import activations, runtime
from tvm_moe import isa as levels
from tvm_moe.accumulators import bf16_bits
from tvm_moe.emulation.plugin import MARK
from tvm_moe.plan import LayerSizes


def marked(region: int, call: Callable[[], Any], calls: int = 1) -> None:
    """Count each of ``calls`` as ``region``; called once before, so that nothing is translated for the first time."""
    system = ctypes.CDLL(None).syscall
    call()
    for _ in range(calls):
        system(MARK)
        call()
        system(MARK + region)


def layer(*, dtype: str, isa: str, experts: int, hidden: int, intermediate: int, loads: dict[str, list[int]]) -> None:
    """A region for each token count of ``loads``, {tokens: rows of each expert}; weights and inputs are random."""
    sizes, kernel = LayerSizes(experts, hidden, intermediate, True), levels.choose(dtype, isa).kernel
    module, made = runtime.load(kernel), random_layer(kernel, sizes)
    for tokens, rows in ((int(t), rows) for t, rows in loads.items()):
        ids = np.repeat(np.arange(len(rows), dtype=np.int32), rows).reshape(-1, tokens).T.copy()
        x = bf16_bits(np.random.default_rng(0).standard_normal((tokens, sizes.hidden)))
        weights = np.full(ids.shape, 0.5, np.float32)
        out = np.empty_like(x)
        plan = made.run(x, out, weights, ids, False, module)
        held, scratch = runtime._scratch.take(plan.scratch_bytes)
        arguments = [a.ctypes.data for a in (x, out, weights, ids)]
        marked(tokens, lambda: module.moe(plan.pointer, *arguments, scratch))
        del held


def random_layer(kernel: Any, sizes: LayerSizes) -> runtime.Layer:
    """Bytes below 64 are harmless numbers in both dtypes; what the weights are does not change what is executed."""
    rng, quantized = np.random.default_rng(0), kernel.dtype == "int8"
    arrays: dict[str, Any] = {}
    for which, shape in (("13", sizes.shape13(kernel)), ("2", sizes.shape2(kernel))):
        bytes_ = rng.integers(0, 63, (*shape[:-1], shape[-1] * kernel.weight_size), dtype=np.uint8)
        one, vectors = (1, 1, kernel.NR), (*shape[:2], kernel.NR)
        arrays[f"w{which}"] = bytes_.view(kernel.weight)
        arrays[f"start{which}"] = np.zeros(vectors if kernel.offset else one, kernel.accumulator)
        arrays[f"scale{which}"] = np.full(vectors if quantized else one, 1e-3, np.float32)
        arrays[f"bias{which}"] = np.zeros(one, np.float32)
    return runtime.Layer(kernel, sizes, activations.resolve("silu"), arrays)


def stages(*, paths: list[str], bytes_of: dict[str, int], panels: int, calls: int) -> None:
    """Region 1, 2, ... for the modules of a tuning task (compiler/stage); ``bytes_of``: its arrays, in order."""
    arrays = [np.zeros(size, np.uint8) for size in bytes_of.values()]
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
    for i, path in enumerate(paths, 1):
        stage = runtime.Library(Path(path), ("stage",)).functions["stage"]
        marked(i, lambda: stage(*pointers, panels, 1), calls)


KINDS: dict[str, Callable[..., None]] = {"layer": layer, "stages": stages}


def main() -> None:
    """A job a line, {"what": name, argument: value, ...}; answers each with a line."""
    for line in sys.stdin:
        job = json.loads(line)
        KINDS[job.pop("what")](**job)
        print("done", flush=True)


if __name__ == "__main__":
    main()
