"""Packing one layer: allocates the kernel's layout and fills it expert by expert with the module's own `pack`."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace
from functools import lru_cache

import torch

from . import activations, isa, runtime
from .activations import ActivationSpec
from .errors import MoEError
from .expert_weights import VECTORS, ExpertWeights, check_alike, check_expert, check_sizes
from .kernels import MicroKernel
from .plan import LayerSizes, Matrix, pack_temp_bytes
from .runtime import Layer

Tensor = torch.Tensor
SOURCE_CODES = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2}  # compiler/driver/pack.SOURCES
WEIGHT_DTYPE = {"int8": torch.int8, "bf16": torch.bfloat16}


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
    """Takes experts in order; `finish` gives the packed layer. The first expert decides which biases exist.

    ``batch`` experts are packed together, which is faster; their tensors must stay as they are until then.
    """

    def __init__(
        self, dtype: str, num_experts: int, hidden: int, intermediate: int, spec: ActivationSpec, interleaved: bool,
        level: str | None, module: runtime.Module | None = None, batch: int = 1,
    ) -> None:  # fmt: skip
        check_sizes(dtype, num_experts, hidden, intermediate)
        if interleaved and not spec.gated:
            raise MoEError(f"interleaved=True needs a gated activation, {spec.name!r} has no gate; leave it out")
        self.kernel = isa.choose(dtype, level).kernel
        self.sizes = LayerSizes(num_experts, hidden, intermediate, spec.gated, linear=spec is activations.NONE)
        self.spec, self.interleaved, self.batch = spec, interleaved, batch
        self.module = module or runtime.load(self.kernel)
        self.tensors: dict[str, Tensor] = {}
        self.vectors: dict[str, Tensor] = {}  # scales and biases as stored [E, N]; packed once, in `finish`
        self.waiting: list[tuple[int, str, Tensor]] = []  # expert, "13" or "2", matrix
        self.room = torch.empty(0, device="cpu")
        self.count = 0

    def add(self, e: int, w: ExpertWeights) -> None:
        """Pack expert ``e``; shapes and dtypes must be those of a layer of these sizes."""
        if e == 0:
            self.begin(w)
        if e != self.count or e >= self.sizes.experts:
            raise MoEError(f"experts must come in order: got expert {e}, expected {self.count} of {self.sizes.experts}")
        check_expert(e, w, self.sizes, self.kernel.dtype)
        check_alike(e, w, self.vectors.keys())
        for name, vectors in self.vectors.items():
            vectors[e] = getattr(w, name).detach().reshape(-1)
        self.count += 1
        if not self.sizes.linear:
            self.take(e, "13", w.w13)
        self.take(e, "2", w.w2)
        if len(self.waiting) >= 2 * self.batch or self.count == self.sizes.experts:
            self.pack_waiting()

    def take(self, e: int, which: str, given: Tensor) -> None:
        """Let a matrix wait for others, unless it had to be copied."""
        matrix = self.readable(given)
        self.waiting.append((e, which, matrix))
        if matrix is not given:  # the next copy will take its place
            self.pack_waiting()

    def readable(self, w: Tensor) -> Tensor:
        """``w`` itself if the module can read it, else a copy, in memory that is taken once and used for every expert."""
        if w.requires_grad or w.is_neg():
            w = w.detach().resolve_neg()
        dtype = w.dtype if w.dtype in SOURCE_CODES else torch.float32  # f16: exact
        if dtype == w.dtype and w.stride(1) == 1:
            return w
        if self.room.numel() < w.numel() or self.room.dtype != dtype:
            self.room = torch.empty(w.numel(), dtype=dtype, device="cpu")
        return self.room[: w.numel()].view(w.shape).copy_(w)  # twice as fast as strided reads in the module

    def begin(self, first: ExpertWeights) -> None:
        self.sizes = replace(self.sizes, bias13=first.w13_bias is not None, bias2=first.w2_bias is not None)
        self.tensors = {n: allocate(*spec, zero=not n.startswith("w")) for n, spec in self.layout.items()}
        for name in VECTORS:
            if (vector := getattr(first, name)) is not None:
                self.vectors[name] = torch.empty(self.sizes.experts, vector.numel(), dtype=torch.float32, device="cpu")

    def rows(self, which: str) -> tuple[int, int, int, int]:
        """Where columns come from: columns of a part in a panel, rows of a part, source rows between columns and parts."""
        I, gated = self.sizes.intermediate, self.sizes.gated
        if which == "2":
            return self.kernel.NR, self.sizes.hidden, 1, 0
        return self.sizes.half(self.kernel), I, *((2, 1) if self.interleaved else (1, I if gated else 0))

    def pack_waiting(self) -> None:
        """One parallel region for all that wait; the module writes weights, start values and (where it quantizes) scales."""
        if not self.waiting:
            return
        fields, size = len(Matrix), 8 * len(Matrix)
        values = array("q", bytes(size * len(self.waiting)))
        at, _ = values.buffer_info()
        for i, waiting in enumerate(self.waiting):
            matrix = self.matrix(*waiting, at + i * size)
            values[i * fields : (i + 1) * fields] = array("q", (matrix[field] for field in Matrix))
        threads = self.module.threads()
        temp = torch.empty(threads * pack_temp_bytes(self.kernel), dtype=torch.uint8, device="cpu")
        self.module.pack(ctypes.c_void_p(at), len(self.waiting), ctypes.c_void_p(runtime.address(temp)), threads)
        self.waiting = []

    def matrix(self, e: int, which: str, w: Tensor, at: int) -> dict[Matrix, int]:
        """One matrix for the module, in a description at address ``at``."""
        half, valid, row_step, part_step = self.rows(which)
        packed, start, scale = (self.tensors[f"{name}{which}"] for name in ("w", "start", "scale"))
        _, panels, groups, _, _ = packed.shape
        start = start[e] if self.kernel.offset else start
        scale = scale[e] if self.kernel.dtype == "int8" else scale
        M = Matrix
        return {
            M.SOURCE: SOURCE_CODES[w.dtype], M.ROW_STEP: row_step, M.PART_STEP: part_step, M.N_STRIDE: w.stride(0),
            M.VALID: valid, M.K: w.shape[1], M.HALF: half, M.PANELS: panels, M.GROUPS: groups,
            M.AT_FROM: runtime.address(w) - at, M.AT_PACKED: runtime.address(packed[e]) - at,
            M.AT_START: runtime.address(start) - at, M.AT_SCALE: runtime.address(scale) - at,
        }  # fmt: skip

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return shapes(self.kernel, self.sizes)

    def finish(self) -> Layer:
        if self.count != self.sizes.experts:
            raise MoEError(f"got {self.count} experts, expected {self.sizes.experts}")
        for name, vectors in self.vectors.items():
            which, kind = name[1:].split("_")
            packed = self.tensors[f"{kind}{which}"]
            half, *rows = self.rows(which)
            fill(packed, vectors, columns(packed.shape[1], self.kernel.NR, half, *rows))
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


def fill(out: Tensor, vectors: Tensor, column: Tensor) -> None:
    """Per-channel vectors [E, N] in packed order [E, panels, NR]; padding columns are zero."""
    torch.index_select(vectors, 1, column.clamp(min=0).reshape(-1), out=out.view(len(vectors), -1))
    out.masked_fill_(column < 0, 0)


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

    down = logical("2", H, kernel.NR, I)
    gate_up = {"w13": t["w2"][e, :0]} if sizes.linear else logical("13", I, half, H)
    return ExpertWeights(**gate_up, **down)  # type: ignore[arg-type]


def repack(layer: Layer, kernel: MicroKernel) -> Layer:
    """The same experts in another kernel's layout, expert by expert."""
    s = layer.sizes
    packer = Packer(kernel.dtype, s.experts, s.hidden, s.intermediate, layer.activation, False, kernel.isa)
    for e in range(s.experts):
        packer.add(e, unpack(layer, e))
    return packer.finish()
