"""``tvm-moe verify FILE``: every kernel of a module file against the reference, on this CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from . import activations, isa, kernels, manifest, reference
from .accumulators import Check, check_all_accumulators
from .errors import ModuleError
from .kernels import MicroKernel
from .packing import ExpertWeights, Packer
from .runtime import Module

# Of the largest output. What can differ from the reference is one step of a requantized intermediate (INT8: 1/127 of its
# row, BF16: 2^-8) in a few of 37 columns, whose signs are random.
LAYER_BOUND = 2.0**-7


def module_files(paths: Iterable[Path], skip: Callable[[str], object]) -> list[Path]:
    """The module files named, and those in the folders named that this CPU executes; ``skip`` is told of the others.

    The helper that reads CPUID has no kernels to verify.
    """
    found = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        for file in sorted(set(path.glob("*.so")) - set(path.glob("*-cpu.so"))):
            if reason := lack(file):
                skip(f"{file.name}: {reason}")
            else:
                found.append(file)
    if not found:
        raise ModuleError(
            f"no kernel modules for this CPU in {', '.join(map(str, paths))}; tvm-moe build --out DIR writes some"
        )
    return found


def named_kernel(path: Path) -> tuple[str, MicroKernel | None]:
    """What the manifest beside a module file calls its kernel, and the row of that name."""
    try:
        name = json.loads(path.with_suffix(".json").read_text())["kernel"]
    except (OSError, ValueError, KeyError, TypeError):
        name = ""
    return name, kernels.by_name(name)


def lack(path: Path) -> str:
    """Why this CPU does not execute a module; "" where it does, or where opening it will say what is wrong."""
    _, kernel = named_kernel(path)
    return isa.executable(kernel)[1] if kernel else ""


def open_module(path: Path) -> tuple[Module, MicroKernel]:
    """The module of a file and its row, if the file is whole and this CPU executes it."""
    if path.suffix != ".so":
        raise ModuleError(f"{path} is no module file; expected a .so file, its manifest beside it")
    name, kernel = named_kernel(path)
    manifest.check(path, kernel)
    if kernel is None:
        raise ModuleError(f"{path} holds kernel {name!r}; expected one of {[k.name for k in kernels.TABLE]}")
    if reason := isa.executable(kernel)[1]:
        raise ModuleError(f"{path} cannot be verified here: {reason}")
    return Module(path), kernel


def verify(path: Path) -> Iterator[Check]:
    """Accumulators of every row count, then whole layers with every activation."""
    module, kernel = open_module(path)
    yield from check_all_accumulators(module, kernel)
    for name in activations.ACTIVATIONS:
        yield check_layer(module, kernel, name)


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
