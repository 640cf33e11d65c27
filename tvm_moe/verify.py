"""``tvm-moe verify FILE``: every kernel of a module file against the reference, on this CPU."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import activations, isa, kernels, manifest, reference
from .errors import ModuleError
from .kernels import MicroKernel
from .packing import ExpertWeights, Packer
from .runtime import Module

# Of the largest output. What can differ from the reference is one step of a requantized intermediate (INT8: 1/127 of its
# row, BF16: 2^-8) in a few of 37 columns, whose signs are random.
LAYER_BOUND = 2.0**-7


@dataclass(frozen=True)
class Check:
    """One line of the result: what ran, its error and the bound it must keep."""

    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN


def module_files(paths: Iterable[Path]) -> list[Path]:
    """The module files named, and those in the folders named; the helper that reads CPUID has no kernels to verify."""
    found = [file for path in paths for file in (sorted(path.glob("*.so")) if path.is_dir() else [path])]
    if not found:
        raise ModuleError(f"no kernel modules in {', '.join(map(str, paths))}; tvm-moe build --out DIR writes some")
    return [file for file in found if not file.stem.endswith("-cpu")] or found


def open_module(path: Path) -> tuple[Module, MicroKernel]:
    """The module of a file and its row, if the file is whole and this CPU executes it."""
    if path.suffix != ".so":
        raise ModuleError(f"{path} is no module file; expected a .so file, its manifest beside it")
    try:
        name = json.loads(path.with_suffix(".json").read_text())["kernel"]
    except (OSError, ValueError, KeyError, TypeError):
        name = ""
    kernel = kernels.by_name(name)
    manifest.check(path, kernel)
    if kernel is None:
        raise ModuleError(f"{path} holds kernel {name!r}; expected one of {[k.name for k in kernels.TABLE]}")
    runs, reason = isa.executable(kernel)
    if not runs:
        raise ModuleError(f"{path} cannot be verified here: {reason}")
    return Module(path), kernel


def verify(path: Path) -> Iterator[Check]:
    """Accumulators of every row count, then whole layers with every activation."""
    module, kernel = open_module(path)
    for rows in range(1, kernel.MR + 2):
        yield check_accumulators(module, kernel, rows)
    for name in activations.ACTIVATIONS:
        yield check_layer(module, kernel, name)


def check_accumulators(module: Module, kernel: MicroKernel, rows: int) -> Check:
    """The sums of ``rows`` gathered rows over two chunks of K: exact in INT8, within K roundings in BF16."""
    rng = np.random.default_rng(rows)
    groups, K = 37, 37 * kernel.group
    integer = kernel.dtype == "int8"
    if integer:
        x = rng.integers(-127, 128, (rows + 2, K), dtype=np.int64)
        w = rng.integers(-128, 128, (kernel.NR, K), dtype=np.int64)
        stored_x, stored_w = (x + kernel.offset).astype(kernel.activation), w.astype(np.int8)
        start = (-kernel.offset * w.sum(1)).astype(np.int32)
    else:
        stored_x, stored_w = (bf16_bits(rng.standard_normal(s)) for s in ((rows + 2, K), (kernel.NR, K)))
        x, w = from_bf16(stored_x), from_bf16(stored_w)
        start = np.zeros(kernel.NR, np.float32)
    packed = np.ascontiguousarray(stored_w.reshape(kernel.NR, groups, kernel.group).transpose(1, 0, 2))
    ids = rng.permutation(rows + 2)[:rows].astype(np.int32)
    acc = np.empty((rows, kernel.NR), start.dtype)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (stored_x, ids, packed, start, acc)]
    temp = np.empty((rows + kernel.row_group) * (K * kernel.itemsize + kernel.NR * 4), np.uint8)
    module.check_panel(rows, pointers[0], K, *pointers[1:], groups, 20, ctypes.c_void_p(temp.ctypes.data))
    exact = x[ids] @ w.T
    error = float(np.abs(acc - exact).max())
    bound = 0.0 if integer else float((np.abs(x[ids]) @ np.abs(w).T).max()) * K * 2.0**-24
    return Check(f"accumulators, {rows} rows", error, bound)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def check_layer(module: Module, kernel: MicroKernel, activation: str) -> Check:
    """A small layer with tails and biases; error relative to the largest output."""
    g = torch.Generator().manual_seed(7)
    E, H, I, T, k = 4, 70, 37, 19, 2
    kind = activations.ACTIVATIONS[activation]
    N, limit = 2 * I if kind.gated else I, 2.0 if kind.needs_limit else None
    w13, w2 = torch.randn(E, N, H, generator=g) / H**0.5, torch.randn(E, H, I, generator=g) / I**0.5
    b13, b2 = torch.randn(E, N, generator=g), torch.randn(E, H, generator=g)
    x, weights = torch.randn(T, H, generator=g), torch.rand(T, k, generator=g)
    ids = torch.rand(T, E, generator=g).topk(k).indices.int()
    spec = activations.resolve(activation, limit=limit)
    packer = Packer(kernel.dtype, E, H, I, spec, False, kernel.isa, module)
    for e in range(E):
        packer.add(e, ExpertWeights(w13[e], w2[e], w13_bias=b13[e], w2_bias=b2[e]))
    got = torch.empty_like(x)
    packer.finish().run(x, got, weights, ids, module=module)
    options = {"dtype": kernel.dtype, "activation": activation, "limit": limit}
    want = reference.fused_moe(x, w13, w2, weights, ids, w13_bias=b13, w2_bias=b2, **options)  # type: ignore[arg-type]
    return Check(f"layer, {activation}", float((got - want).abs().max() / want.abs().max()), LAYER_BOUND)
