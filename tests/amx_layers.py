"""Run by `test_x86_emulated`: AMX layers, the instructions emulated; what was executed goes to stdout."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import torch

import tvm_moe
from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tests.test_kernels import accumulate, bf16, exact, int8_start, signed
from tests.vnni_layers import accumulators
from tvm_moe import PackedExperts, isa, kernels, runtime

KINDS = "configured", "reshaped", "released", "zeroed", "loaded", "stored", "int8", "bf16", "rows multiplied"
PANEL_ROWS = 1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 37, 64, 65


class Emulator:
    """What the library has executed since the last look."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.amx_count.restype = ctypes.c_uint64
        assert self.library.amx_install() == 0
        self.seen = dict.fromkeys(KINDS, 0)

    def executed(self) -> dict[str, int]:
        now = {kind: self.library.amx_count(i) for i, kind in enumerate(KINDS)}
        last, self.seen = self.seen, now
        return {kind: now[kind] - last[kind] for kind in KINDS if now[kind] > last[kind]}


def one_panel(kernel, rows, steps):
    """One panel of so many K steps and one block of rows."""
    x, w = np.ones((rows, steps * kernel.k_step), np.int64), np.ones((kernel.NR, steps * kernel.k_step))
    operands = (signed(kernel, x), w.astype(np.int8)) if kernel.dtype == "int8" else (bf16(x), bf16(w))
    start = int8_start(kernel, operands[1]) if kernel.dtype == "int8" else np.zeros(kernel.NR, np.float32)
    assert (accumulate(kernel, *operands, start, 1000) == steps * kernel.k_step).all()


def equal_to_avx512(kernel):
    """The accumulators of the level below, with all extremes among the operands."""
    rng, other = np.random.default_rng(1), kernels.find("avx512_vnni", "int8")
    w, x = rng.integers(-128, 128, (kernel.NR, 517)).astype(np.int8), rng.integers(-127, 128, (33, 517))
    x[1], w[1] = -127, -128
    got, want = (accumulate(k, signed(k, x), w, int8_start(k, w), 40) for k in (kernel, other))
    assert np.array_equal(got, want)
    assert np.array_equal(got, exact(x, w))


def bf16_chain(kernel):
    """Bit-equal whatever the row count and the chunk of K."""
    rng = np.random.default_rng(2)
    x, w = bf16(rng.standard_normal((34, 300))), bf16(rng.standard_normal((kernel.NR, 300)))
    start = rng.standard_normal(kernel.NR).astype(np.float32)
    want = accumulate(kernel, x, w, start, 1000)
    for n in (1, 2, 3, 15, 16, 17, 31, 32, 33):
        for chunk in (1, 3, 1000):
            assert np.array_equal(accumulate(kernel, x[:n], w, start, chunk), want[:n])


def layers(kernel):
    """Every activation; tails of H and I; tokens around the rows of a tile; a token's result whatever the batch around it."""
    tokens = 0, 1, 2, 15, 16, 17, 33, 64
    for i, options in enumerate(ACTIVATION_OPTIONS):
        T, sizes = tokens[i], ({"H": 70, "I": 21}, {"H": 64, "I": 33}, {"H": 130, "I": 96})[i % 3]
        case = make_case(T=T, E=2 + i % 3, bias=i % 2 == 0, **sizes, **options, dtype=kernel.dtype)
        packed = case.pack(kernel)
        runtime._scratch.take(8 << 20)[0].fill(0xFF)  # NaN: nothing may count that was not written before
        got = case.run(packed)
        assert_matches_reference(got, case)
        for t in range(0, T, 9):
            alone = case.but(x=case.x[t : t + 1], weights=case.weights[t : t + 1], ids=case.ids[t : t + 1])
            assert torch.equal(alone.run(packed), got[t : t + 1])


def files(kernel, folder):
    """A file that was packed for the level below is repacked, and one of this level is mapped."""
    case = make_case(T=20, H=70, I=21, dtype=kernel.dtype, bias=True)
    packed, path = case.pack(kernel), Path(folder, f"{kernel.key}.safetensors")
    below = case.pack(isa.choose(kernel.dtype, "avx512_vnni").kernel)
    below.save(path)
    repacked = PackedExperts.load(path, "amx")
    assert repacked.isa == "amx"
    assert all(torch.equal(repacked.layer.arrays[name], packed.layer.arrays[name]) for name in ("w13", "w2", "start13"))
    assert torch.equal(case.run(repacked), case.run(packed))
    packed.save(path)
    assert torch.equal(case.run(PackedExperts.load(path)), case.run(packed))


def probe_and_tasks(kernel, folder):
    """What measures the peak, and what tunes each tile: two panels."""
    from tvm_moe.bench.probes import Probe
    from tvm_moe.compiler import build, stage

    assert Probe(kernel).peak(2, repetitions=1) > 0
    for rows in stage.buckets(kernel):
        task = stage.Task("amx", kernel.dtype, "down", 100, rows)
        made = Path(folder, f"{kernel.key}-{rows}.so")
        build.export(kernel, "x86_64", made, lambda _, arch, task=task: stage.build_ir(task, arch, ()))
        library = runtime.Library(made, ("stage",))
        library.join_team()
        arrays = [np.zeros(size, np.uint8) for size in task.bytes_of(2).values()]
        library.functions["stage"](*(ctypes.c_void_p(a.ctypes.data) for a in arrays), 2, 1)


def main(path: str, folder: str) -> dict[str, dict[str, int]]:
    emulator, made = Emulator(path), {}
    rows = {dtype: kernels.find("amx", dtype) for dtype in kernels.dtypes_of("amx")}
    known = isa.features().union(*(kernel.features for kernel in rows.values()))
    isa.features = lambda: known
    tvm_moe.set_num_threads(2)
    for dtype, kernel in rows.items():
        for n in PANEL_ROWS:
            one_panel(kernel, n, 3)
            made[f"{dtype}, {n} rows"] = emulator.executed()
        if dtype == "int8":
            accumulators(kernel)
            equal_to_avx512(kernel)
        else:
            bf16_chain(kernel)
        layers(kernel)
        files(kernel, folder)
        made[f"{dtype}, layers"] = emulator.executed()
        probe_and_tasks(kernel, folder)
        made[f"{dtype}, probe and tasks"] = emulator.executed()
    return made


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
