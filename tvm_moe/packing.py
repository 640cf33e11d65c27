"""Packing one layer: allocates the kernel's layout and fills it expert by expert with the module's own `pack`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from . import isa, runtime
from .activations import ActivationSpec
from .errors import MoEError
from .kernels import MicroKernel
from .plan import LayerSizes, pack_temp_bytes
from .runtime import Layer

Tensor = torch.Tensor
SOURCE_CODES = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2}  # compiler/driver/pack.SOURCES
WEIGHT_DTYPE = {"int8": torch.int8, "bf16": torch.bfloat16}
INT8_MAX_K = 2**31 // (127 * 128)  # 133,000: beyond it an int32 sum of products could overflow


@dataclass(frozen=True)
class ExpertWeights:
    """One expert as stored: w13 [2I, H] ([I, H] without gate), w2 [H, I], any strides; scales and biases [N] or None."""

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


def shapes(kernel: MicroKernel, sizes: LayerSizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every packed tensor; one vector of zeros stands for starts, scales and biases that do not exist."""
    E, panels13, _, NR, _ = shape13 = sizes.shape13(kernel)
    _, panels2, _, _, _ = shape2 = sizes.shape2(kernel)
    accumulator = torch.int32 if kernel.dtype == "int8" else torch.float32

    def vectors(panels: int, exist: bool, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        return ((E, panels, NR) if exist else (1, 1, NR)), dtype

    quantized = kernel.dtype == "int8"
    return {
        "w13": (shape13, WEIGHT_DTYPE[kernel.dtype]),
        "start13": vectors(panels13, bool(kernel.offset), accumulator),
        "scale13": vectors(panels13, quantized, torch.float32),
        "bias13": vectors(panels13, sizes.bias13, torch.float32),
        "w2": (shape2, WEIGHT_DTYPE[kernel.dtype]),
        "start2": vectors(panels2, bool(kernel.offset), accumulator),
        "scale2": vectors(panels2, quantized, torch.float32),
        "bias2": vectors(panels2, sizes.bias2, torch.float32),
    }


class Packer:
    """Takes experts in order; `finish` gives the packed layer. The first expert decides which biases exist."""

    def __init__(
        self, dtype: str, num_experts: int, hidden: int, intermediate: int, spec: ActivationSpec, interleaved: bool,
        level: str | None, module: runtime.Module | None = None,
    ) -> None:  # fmt: skip
        check_sizes(dtype, num_experts, hidden, intermediate)
        if interleaved and not spec.gated:
            raise MoEError(f"interleaved=True needs a gated activation, {spec.name!r} has no gate; leave it out")
        self.kernel = isa.choose(dtype, level).kernel
        self.sizes = LayerSizes(num_experts, hidden, intermediate, spec.gated)
        self.spec, self.interleaved = spec, interleaved
        self.module = module or runtime.load(self.kernel)
        self.tensors: dict[str, Tensor] = {}
        self.used: tuple[Tensor, ...] = ()
        self.count = 0

    def add(self, e: int, w: ExpertWeights) -> None:
        """Pack expert ``e``; shapes and dtypes must be those of a layer of these sizes."""
        if e == 0:
            self.sizes = replace(self.sizes, bias13=w.w13_bias is not None, bias2=w.w2_bias is not None)
            self.tensors = {n: allocate(*spec, zero=not n.startswith("w")) for n, spec in self.layout.items()}
        if e != self.count or e >= self.sizes.experts:
            raise MoEError(f"experts must come in order: got expert {e}, expected {self.count} of {self.sizes.experts}")
        check_expert(e, w, self.sizes, self.kernel.dtype)
        half = self.sizes.half(self.kernel)
        I, H, gated = self.sizes.intermediate, self.sizes.hidden, self.sizes.gated
        row_step, part_step = (2, 1) if self.interleaved else (1, I if gated else 0)
        self.matrix(e, "13", w.w13, w.w13_scale, w.w13_bias, row_step, part_step, I, half)
        self.matrix(e, "2", w.w2, w.w2_scale, w.w2_bias, 1, 0, H, self.kernel.NR)
        self.count += 1

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return shapes(self.kernel, self.sizes)

    def matrix(
        self, e: int, which: str, w: Tensor, scale: Tensor | None, bias: Tensor | None,
        row_step: int, part_step: int, valid: int, half: int,
    ) -> None:  # fmt: skip
        """Pack one matrix [N, K]; the module writes weights, start values and (where it quantizes) scales."""
        w = w.detach().resolve_neg()
        if w.dtype not in SOURCE_CODES:
            w = w.float()  # f16: exact
        if w.stride(1) != 1:  # transposed: a copy of one expert is twice as fast as strided reads in the module
            w = w.contiguous()
        t, kernel = self.tensors, self.kernel
        _, panels, groups, NR, _ = t[f"w{which}"].shape
        threads = min(self.module.threads(), panels)
        temp = torch.empty(threads * pack_temp_bytes(kernel), dtype=torch.uint8, device="cpu")
        start, scales = t[f"start{which}"], t[f"scale{which}"]
        start = start[e] if kernel.offset else torch.empty(panels, NR, dtype=torch.int32, device="cpu")
        scales = scales[e] if kernel.dtype == "int8" else scales
        self.used = (w, t[f"w{which}"][e], start, scales, temp)  # until the module is done with their addresses
        source, *pointers = (ctypes.c_void_p(runtime.address(x)) for x in self.used)
        self.module.pack(
            source, SOURCE_CODES[w.dtype], row_step, part_step, w.stride(0),
            valid, w.shape[1], half, panels, groups, *pointers, threads,
        )  # fmt: skip
        self.used = ()
        column = columns(panels, NR, half, valid, row_step, part_step)
        for name, vector in ((f"scale{which}", scale), (f"bias{which}", bias)):
            if vector is not None:
                fill(t[name][e], vector, column)

    def finish(self) -> Layer:
        if self.count != self.sizes.experts:
            raise MoEError(f"got {self.count} experts, expected {self.sizes.experts}")
        for name in ("scale13", "scale2"):
            bad = torch.nonzero(~torch.isfinite(self.tensors[name]).all(-1).all(-1))
            if len(bad):
                raise MoEError(
                    f"expert {int(bad[0])}, w{name[5:]}: weights or scales are not finite (NaN or Inf); check the checkpoint"
                )
        return Layer(self.kernel, self.sizes, self.spec, self.tensors)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, zero: bool) -> Tensor:
    """On the CPU even where the caller has made another device the default; large tensors on huge pages where allowed."""
    if zero:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    made = torch.empty(shape, dtype=dtype, device="cpu")
    advise_huge_pages(made.data_ptr(), made.numel() * made.element_size())
    return made


def advise_huge_pages(start: int, size: int) -> None:
    """Ask for 2 MB pages: 512 times fewer page faults while packing. Only advice: a refusal changes nothing."""
    page, advice = 2 << 20, 14  # MADV_HUGEPAGE
    first, last = -(-start // page) * page, (start + size) // page * page
    if last > first and hasattr(libc := ctypes.CDLL(None), "madvise"):
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


@lru_cache(maxsize=16)
def columns(panels: int, NR: int, half: int, valid: int, row_step: int, part_step: int) -> Tensor:
    """Source row of every packed column [panels, NR], -1 where the column is padding (see compiler/driver/pack)."""
    c = torch.arange(NR, device="cpu")
    i = torch.arange(panels, device="cpu")[:, None] * half + c % half
    return torch.where(i < valid, i * row_step + c // half * part_step, -1)


def fill(out: Tensor, vector: Tensor, column: Tensor) -> None:
    """A per-channel vector [N] or [N, 1] in packed order [panels, NR]; padding columns are zero."""
    padded = torch.cat(
        (vector.detach().resolve_neg().reshape(-1).float(), torch.zeros(1, dtype=torch.float32, device="cpu"))
    )  # index -1 is the zero at the end
    torch.take(padded, torch.where(column < 0, len(padded) - 1, column), out=out)


def check_sizes(dtype: str, E: int, H: int, I: int) -> None:
    if dtype not in WEIGHT_DTYPE:
        raise MoEError(f"dtype={dtype!r} is not supported; expected one of {sorted(WEIGHT_DTYPE)} or None")
    for name, value in (("num_experts", E), ("hidden_size", H), ("intermediate_size", I)):
        if value < 1:
            raise MoEError(f"{name} must be at least 1, got {value}")
    if dtype == "int8" and max(H, I) > INT8_MAX_K:
        raise MoEError(f"INT8 sums over K = {max(H, I)} can overflow int32; K may be at most {INT8_MAX_K}: use bf16")


def check_expert(e: int, w: ExpertWeights, sizes: LayerSizes, dtype: str) -> None:
    """Shapes, dtypes and device of one expert."""
    I, H = sizes.intermediate, sizes.hidden
    N = 2 * I if sizes.gated else I
    for name, tensor, rows, cols in (("w13", w.w13, N, H), ("w2", w.w2, H, I)):
        check_weight(f"expert {e}, {name}", tensor, (rows, cols), dtype)
        for kind in ("scale", "bias"):
            vector = getattr(w, f"{name}_{kind}")
            exists = vector is not None
            wanted = tensor.dtype == torch.int8 if kind == "scale" else getattr(sizes, f"bias{name[1:]}")
            if exists != wanted:
                state = "missing" if wanted else "unexpected"
                raise MoEError(
                    f"expert {e}: {name}_{kind} is {state}; int8 weights need scales, float weights take none"
                )
            if exists and (vector.numel() != rows or not vector.is_floating_point()):
                raise MoEError(
                    f"expert {e}: {name}_{kind} has shape {tuple(vector.shape)} and dtype {vector.dtype}, "
                    f"expected [{rows}] or [{rows}, 1] floating"
                )


def check_weight(label: str, tensor: Tensor, shape: tuple[int, int], dtype: str) -> None:
    if tensor.device.type != "cpu":
        raise MoEError(f"{label} is on {tensor.device}; this package runs on the CPU: call .cpu() first")
    if tuple(tensor.shape) != shape:
        raise MoEError(f"{label} has shape {tuple(tensor.shape)}, expected {shape}")
    floating = tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not (floating or (tensor.dtype == torch.int8 and dtype == "int8")):
        raise MoEError(f"{label} is {tensor.dtype}; dtype={dtype!r} takes bfloat16, float16, float32"
                       f"{' or int8' if dtype == 'int8' else ''}")  # fmt: skip


def unpack(layer: Layer, e: int) -> ExpertWeights:
    """Expert ``e`` in logical layout, half-split; exact (INT8 with its scales)."""
    t, sizes, kernel = layer.arrays, layer.sizes, layer.kernel
    half, I, H = sizes.half(kernel), sizes.intermediate, sizes.hidden

    def logical(which: str, valid: int, half: int, K: int) -> dict[str, Tensor | None]:
        w = t[f"w{which}"][e]
        panels, groups, NR, group = w.shape
        parts = NR // half
        column = columns(panels, NR, half, valid, 1, valid if parts == 2 else 0).reshape(-1)
        order = torch.argsort(column[column >= 0])
        keep = torch.nonzero(column >= 0).reshape(-1)[order]
        rows = w.permute(0, 2, 1, 3).reshape(panels * NR, groups * group)[keep, :K]
        vectors = {kind: t[f"{kind}{which}"] for kind in ("scale", "bias")}
        wanted = {"scale": kernel.dtype == "int8", "bias": getattr(sizes, f"bias{which}")}
        named = {f"w{which}_{k}": v[e].reshape(-1)[keep] if wanted[k] else None for k, v in vectors.items()}
        return {f"w{which}": rows, **named}

    return ExpertWeights(**logical("13", I, half, H), **logical("2", H, kernel.NR, I))  # type: ignore[arg-type]


def repack(layer: Layer, kernel: MicroKernel) -> Layer:
    """The same experts in another kernel's layout, expert by expert."""
    s = layer.sizes
    packer = Packer(kernel.dtype, s.experts, s.hidden, s.intermediate, layer.activation, False, kernel.isa)
    for e in range(s.experts):
        packer.add(e, unpack(layer, e))
    return packer.finish()
