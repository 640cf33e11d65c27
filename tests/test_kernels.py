"""The micro-kernel table, and the accumulators of every row count and chunking: exact in INT8, one chain in BF16."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tvm_moe
from tests.helpers import U
from tvm_moe import MoEError, isa, kernels, runtime
from tvm_moe.accumulators import room
from tvm_moe.expert_weights import INT8_MAX_K
from tvm_moe.kernels import TABLE
from tvm_moe.schedules import STYLES


def test_rows_have_names_and_keys_of_their_own():
    for attribute in ("name", "key"):
        assert len({getattr(k, attribute) for k in TABLE}) == len(TABLE)
    assert all(kernels.find(k.isa, k.dtype) is k and kernels.by_name(k.name) is k for k in TABLE)


def test_rows_refer_to_what_exists():
    for kernel in TABLE:
        assert kernel.style in STYLES
        intrinsics = Path(tvm_moe.__file__).parent / "compiler" / "intrin"
        assert kernel.intrinsic is None or (intrinsics / f"{kernel.intrinsic}.py").is_file()
        assert kernel.features <= isa.X86_BITS.keys() | isa.AARCH64_BITS.keys()
        assert all(kernel.isa in isa.LADDER[arch] for arch in kernel.arches)


def test_every_architecture_has_every_dtype_for_every_cpu_and_the_table_climbs():
    for arch, ladder in isa.LADDER.items():
        for dtype in kernels.DTYPES:
            found = kernels.rows_for(arch, dtype)
            assert found[0].isa == "generic"
            assert (found[0].features, found[0].mcpu(arch)) == (frozenset(), "")
            levels = [ladder.index(k.isa) for k in found]
            assert levels == sorted(set(levels))


def test_rows_that_cannot_be():
    with pytest.raises(MoEError, match=r"rows must be 1 and row_group..MR by row_group, got \(1, 2, 4\)"):
        replace(TABLE[0], rows=(1, 2, 4))
    with pytest.raises(MoEError, match="NR must be a multiple of 32"):
        replace(TABLE[0], NR=48)
    few = kernels.find("amx", "int8").few
    with pytest.raises(MoEError, match=r"few rows are served by .*avx512_vnni, which reads other operands or panels"):
        replace(kernels.find("amx", "bf16"), rows=(1, 2, 16, 32), few=few)
    with pytest.raises(MoEError, match=r"existing: generic-int8"):
        kernels.find("amx9", "int8")


HANDLE = ctypes.c_void_p


def packed_panel(kernel, w):
    """Logical weights [NR, K] as [K / group, NR, group]."""
    return np.ascontiguousarray(w.reshape(kernel.NR, -1, kernel.group).transpose(1, 0, 2))


def accumulate(kernel, x, w, start, chunk, rows=None):
    """Accumulators [n, NR] of ``x [T, K]`` and ``w [NR, K]`` as stored, from `check_panel`; ``chunk`` in its steps."""
    rows = np.arange(len(x)) if rows is None else rows
    x, w = (np.pad(a, ((0, 0), (0, -a.shape[1] % kernel.k_step))) for a in (x, w))
    rows, panel = np.ascontiguousarray(rows, np.int32), packed_panel(kernel, w)
    acc = np.full((len(rows) + 1, kernel.NR), 77, kernel.accumulator)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (np.ascontiguousarray(x), rows, panel, start, acc)]
    temp = room(kernel, len(rows), x.shape[1])
    runtime.load(kernel).check_panel(
        len(rows),
        pointers[0],
        x.shape[1],
        *pointers[1:],
        x.shape[1] // kernel.group,
        chunk * kernel.depth,
        temp.ctypes.data_as(HANDLE),
    )
    assert (acc[-1] == 77).all(), "wrote past the last row"
    return acc[:-1]


def signed(kernel, x):
    """int8 activations in the kernel's operand type, and the start values' sign of that offset."""
    return (x + kernel.offset).astype(kernel.activation)


def exact(x, w):
    total = x.astype(np.int64) @ w.astype(np.int64).T
    assert abs(total).max() < 2**31
    return total


def int8_start(kernel, w):
    return (-kernel.offset * w.astype(np.int64).sum(1)).astype(np.int32)  # modulo 2^32, as the hardware adds


CHUNKS = [1, 3, 16, 17, 1000]


@pytest.mark.parametrize("groups", [1, 2, 17, 64])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_int8_accumulators_are_exact(int8_kernel, groups, chunk):
    kernel, rng = int8_kernel, np.random.default_rng(groups)
    K = groups * kernel.group
    w = rng.integers(-128, 128, (kernel.NR, K)).astype(np.int8)
    for n in range(1, kernel.MR + 2):
        x = rng.integers(-127, 128, (n + 3, K))
        rows = rng.integers(0, n + 3, n)  # any order, with repetitions
        got = accumulate(kernel, signed(kernel, x), w, int8_start(kernel, w), chunk, rows)
        assert np.array_equal(got, exact(x[rows], w))


@pytest.mark.parametrize("a", [-128, -127, 127])
@pytest.mark.parametrize("b", [-128, -127, 127])
@pytest.mark.parametrize("groups", [1, 33, 16_500])
def test_int8_accumulators_do_not_saturate(int8_kernel, a, b, groups):
    """The largest operands (255 * 127 * 2 overflows int16), and sums whose shifted halves pass 2^31."""
    kernel, K = int8_kernel, groups * int8_kernel.group
    x, w = np.full((kernel.MR, K), a), np.full((kernel.NR, K), b, np.int8)
    got = accumulate(kernel, signed(kernel, x), w, int8_start(kernel, w), 5000)
    assert np.array_equal(got, exact(x, w))


def test_int8_levels_have_equal_accumulators():
    """From one logical matrix as wide as the widest panel."""
    found = [k for k in kernels.rows_for(isa.machine(), "int8") if isa.executable(k)[0]]
    width, K = max(k.NR for k in found), 264
    rng = np.random.default_rng(0)
    x, w = rng.integers(-127, 128, (5, K)), rng.integers(-128, 128, (width, K)).astype(np.int8)

    def whole(kernel):
        panels = [w[i : i + kernel.NR] for i in range(0, width, kernel.NR)]
        return np.hstack([accumulate(kernel, signed(kernel, x), p, int8_start(kernel, p), 7) for p in panels])

    assert len(found) > 1 or found[0].isa == "generic"
    assert all(np.array_equal(whole(kernel), exact(x, w)) for kernel in found)


def bf16(values):
    """bf16 by truncation, as stored bits."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("K", [2, 34, 1000])
def test_bf16_accumulators_are_one_chain(bf16_kernel, K):
    """Bit-equal whatever the row count and the chunk, and within K roundings of the exact sum (Higham, 3.5)."""
    kernel, rng = bf16_kernel, np.random.default_rng(K)
    x, w = bf16(rng.standard_normal((kernel.MR + 1, K))), bf16(rng.standard_normal((kernel.NR, K)))
    start = rng.standard_normal(kernel.NR).astype(np.float32)
    want = accumulate(kernel, x, w, start, K)
    for n in range(1, kernel.MR + 2):
        for chunk in CHUNKS:
            assert np.array_equal(accumulate(kernel, x[:n], w, start, chunk), want[:n])
    terms = np.abs(widened(x)) @ np.abs(widened(w)).T + np.abs(start)
    error = np.abs(want - (widened(x) @ widened(w).T + start))
    assert (error <= (K + 1) * U / (1 - (K + 1) * U) * terms).all()


def test_bf16_nan_and_inf(bf16_kernel):
    kernel = bf16_kernel
    x = bf16(np.array([[1.0, 2], [np.nan, 2], [np.inf, 2], [1, -np.inf]]))
    w = bf16(np.ones((kernel.NR, 2)))
    got = accumulate(kernel, x, w, np.zeros(kernel.NR, np.float32), 1)
    assert (got[0] == 3).all()
    assert np.isnan(got[1]).all()
    assert (got[2] == np.inf).all()
    assert (got[3] == -np.inf).all()


@pytest.mark.parametrize("offset", [4, 20, 60])
def test_operands_need_no_alignment_beyond_their_own(kernel, offset):
    """Files are mapped wherever they lie, and rows of a caller's tensor start where it likes."""
    rng = np.random.default_rng(0)
    K = 5 * max(8, kernel.k_step)
    x = rng.integers(0, 100, (kernel.MR, K)).astype(kernel.activation)
    w = rng.integers(0, 100, (kernel.NR, K)).astype(kernel.weight)
    start = np.zeros(kernel.NR, kernel.accumulator)
    want = accumulate(kernel, x, w, start, 3)

    def shifted(array):
        raw = np.empty(array.nbytes + 128, np.uint8)
        at = (-raw.ctypes.data) % 64 + offset
        view = raw[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view

    rows, acc = shifted(np.arange(kernel.MR, dtype=np.int32)), shifted(np.empty_like(want))
    arrays = [shifted(x), rows, shifted(packed_panel(kernel, w)), shifted(start), acc]
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
    temp = room(kernel, kernel.MR, K)
    runtime.load(kernel).check_panel(
        kernel.MR, pointers[0], K, *pointers[1:], K // kernel.group, 3 * kernel.depth, temp.ctypes.data_as(HANDLE)
    )
    assert np.array_equal(acc, want)


def test_the_largest_k_of_int8_fits_int32():
    assert INT8_MAX_K * 127 * 128 <= 2**31 < (INT8_MAX_K + 1) * 127 * 128
