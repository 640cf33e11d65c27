"""Run by `test_x86_emulated`: layers on a level that this CPU lacks, emulated; what was executed goes to stdout."""

from __future__ import annotations

import ctypes
import json
import sys

import numpy as np

import tvm_moe
from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tests.test_kernels import accumulate, exact, int8_start, signed
from tvm_moe import isa, kernels


def accumulators(kernel):
    """Exact for every row count, and with the operands that would saturate vpmaddubsw."""
    rng = np.random.default_rng(0)
    w, x = rng.integers(-128, 128, (kernel.NR, 36)).astype(np.int8), rng.integers(-127, 128, (kernel.MR + 1, 36))
    x[0], w[0] = 127, 127
    for n in range(1, kernel.MR + 2):
        got = accumulate(kernel, signed(kernel, x[:n]), w, int8_start(kernel, w), 5)
        assert np.array_equal(got, exact(x[:n], w))


def layers(kernel):
    for i, options in enumerate(ACTIVATION_OPTIONS):
        case = make_case(T=(1, 5, 13)[i % 3], H=38, I=21, bias=i % 2 == 0, **options, dtype="int8")
        assert_matches_reference(case.run(case.pack(kernel)), case)


def stored_case():
    """What `save` packs; the same in every process."""
    return make_case(T=9, H=66, I=35, bias=True, weights="int8")


if __name__ == "__main__":
    level, emulator, path = sys.argv[1], ctypes.CDLL(sys.argv[2]), sys.argv[3]
    emulator.vnni_count.restype = ctypes.c_uint64
    assert emulator.vnni_install() == 0
    kernel = kernels.find(level, "int8")
    known = isa.features() | kernel.features
    isa.features = lambda: known
    tvm_moe.set_num_threads(2)
    accumulators(kernel)
    layers(kernel)
    stored_case().pack(kernel).save(path)
    json.dump([emulator.vnni_count(0), emulator.vnni_count(1)], sys.stdout)
