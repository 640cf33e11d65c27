"""Load a kernel module and run a layer with it, from apache-tvm-ffi alone. Takes any DLPack array; needs no torch."""

from __future__ import annotations

import ctypes
import json
import threading
from array import array
from dataclasses import asdict, replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from . import modules, plan, threads, tuning
from .activations import ActivationSpec
from .errors import ModuleError, MoEError
from .kernels import MicroKernel
from .plan import LayerSizes, Plan

X_CODES = {"bfloat16": 0, "uint16": 0, "float32": 1}  # storage of hidden_states and output; uint16 holds bf16
PLANS = 1024  # cached per layer; a server sees as many token counts at most
FORMAT = "tvm_moe packed experts 1"
ARRAYS = ("w13", "start13", "scale13", "bias13", "w2", "start2", "scale2", "bias2")


class Library:
    """Exported functions of one module file; its parallel regions go to the process's OpenMP team."""

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self.path = path
        try:
            self._module = tvm_ffi.load_module(str(path))
            self._library = ctypes.CDLL(str(path))
            self.functions = {name: self._module[name] for name in names}
            launch = ctypes.c_void_p.in_dll(self._library, "moe_launch_ptr").value
            # Each module has a launch pointer of its own: nobody else's parallel regions are touched.
            ctypes.c_void_p.in_dll(self._library, "__TVMBackendParallelLaunch").value = launch
            self._gomp = ctypes.c_void_p.in_dll(self._library, "moe_gomp_parallel")
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            raise ModuleError(f"{path} cannot be loaded as a tvm_moe module: {error}; build it again") from error

    def join_team(self) -> None:
        """Run parallel regions on the process's OpenMP team from now on; without one they run serially."""
        if self._gomp.value is None:
            self._gomp.value = threads.team()

    @property
    def parallel(self) -> bool:
        return self._gomp.value is not None

    def threads(self) -> int:
        """Threads for the next call, with the team put in place."""
        self.join_team()
        return threads.get_num_threads()


class Module(Library):
    """A layer's functions."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ("moe", "pack", "check_panel"))
        self.moe, self.pack, self.check_panel = self.functions.values()


@cache
def load(kernel: MicroKernel) -> Module:
    """The shape-generic module of ``kernel`` for this machine, found or built by `modules.find`."""
    return Module(modules.find(kernel))


@cache
def load_tuned(kernel: MicroKernel, variant: str) -> Module | None:
    path = modules.find_tuned(kernel, variant)
    return None if path is None else Module(path)


def address(array: Any) -> int:
    """Address of the first element of a CPU array (torch, numpy, or anything with DLPack)."""
    if hasattr(array, "data_ptr"):
        pointer = array.data_ptr()
        if not pointer and array.numel():
            raise MoEError(
                f"a {type(array).__name__} has no memory of its own (fake, traced or wrapped); pass a plain tensor"
            )
        return pointer
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return dlpack_address(array)


class DLTensor(ctypes.Structure):
    """The head of dlpack.h's struct: tensors of older tvm_ffi (0.1.11) do not tell their address."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


def dlpack_address(array: Any) -> int:
    """The address in a DLPack capsule, which lives no longer than this call; the array must."""
    capsule, unwrap = array.__dlpack__(), ctypes.pythonapi.PyCapsule_GetPointer
    unwrap.restype, unwrap.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = DLTensor.from_address(unwrap(capsule, b"dltensor"))
    return tensor.data + tensor.byte_offset


def dtype_name(dtype: Any) -> str:
    """ "float32" of torch.float32 and of numpy's alike."""
    return str(dtype).rsplit(".", 1)[-1]


class Scratch(threading.local):
    """Working memory of the calling thread: grows, is reused, and so costs steady-state calls nothing."""

    def __init__(self) -> None:
        self.held = np.empty(0, np.uint8), 0, 0  # array, its start, its size: replaced together

    def take(self, size: int) -> tuple[np.ndarray, int]:
        """At least ``size`` bytes, and their address, at a cache line; the caller holds the array while it uses them."""
        array, start, have = self.held
        if size > have:  # a signal handler may run in between, and call us: nothing half made may be seen
            array = np.empty(size + 64, np.uint8)
            start = -(-array.ctypes.data // 64) * 64
            self.held = array, start, size
        return array, start


_scratch = Scratch()


class Layer:
    """A packed layer as the module sees it: the row that packed it, its sizes, its arrays (`ARRAYS`, kept alive here)."""

    def __init__(
        self, kernel: MicroKernel, sizes: LayerSizes, activation: ActivationSpec, arrays: dict[str, Any]
    ) -> None:
        self.kernel, self.sizes, self.activation, self.arrays = kernel, sizes, activation, arrays
        self.description = json.dumps(  # all of it but the arrays: the metadata of files, an argument of `ops`
            {
                "format": FORMAT,
                "kernel": kernel.name,
                "sizes": json.dumps(asdict(sizes)),
                "activation": json.dumps([activation.name, activation.alpha, str(activation.limit)]),
            }
        )
        self._addresses = [address(arrays[name]) for name in ARRAYS]
        self._plans: dict[tuple[int, ...], Plan] = {}
        self.known: dict[Any, Plan] = {}  # of calls that `api` need not check again

    def plan(
        self, tokens: int, top_k: int, threads: int, x_stride: int, out_stride: int,
        x_code: int = 0, ids_wide: bool = False, on_input: bool = False, row_slots: int = 0,
    ) -> Plan:  # fmt: skip
        """The cached plan of calls of one kind; strides are those of the rows of hidden_states and output.

        ``row_slots``: consecutive slots that a row of hidden_states serves (0: top_k, it is a token).
        """
        call = tokens, top_k, threads, x_stride, out_stride, row_slots, x_code, ids_wide, on_input
        found = self._plans.get(call)
        if found is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
                self.known.clear()
            cut = plan.parts(self.kernel, self.sizes, tokens, top_k, threads, row_slots)
            made = [self.part(end - begin, *call[1:]) for begin, end in cut]
            found = self._plans[call] = made[0] if len(made) == 1 else parted(made, x_code, ids_wide)
        return found

    def part(
        self, tokens: int, top_k: int, threads: int, x_stride: int, out_stride: int, row_slots: int, *kind: int
    ) -> Plan:
        made = plan.make(self.kernel, self.sizes, tokens, top_k, threads, x_stride, out_stride, row_slots)
        self.complete(made, *kind)
        return made

    def complete(self, p: Plan, x_code: int, ids_wide: int, on_input: int) -> None:
        """Enter this layer and the kind of call."""
        F, own = plan.Field, p.values.buffer_info()[0]
        spec = self.activation
        p.values[F.SELF] = own
        p.values[F.FROM_W13 : F.FROM_BIAS2 + 1] = array("q", (a - own for a in self._addresses))
        bits = array("i", array("f", (spec.alpha, spec.limit)).tobytes())
        p.values[F.ACTIVATION :] = array("q", (spec.form(self.sizes.bias13), *bits, x_code, ids_wide, on_input))

    @cached_property
    def module(self) -> Module:
        """Tuned for this CPU and shape where such a module has been built, else the shape-generic one."""
        return load_tuned(self.kernel, self.tuning.variant) or load(self.kernel)

    @cached_property
    def tuning(self) -> tuning.Choice:
        return tuning.choose(self.kernel, self.sizes.hidden, self.sizes.intermediate)

    def run(
        self, x: Any, out: Any, weights: Any, ids: Any, on_input: bool = False, module: Module | None = None
    ) -> Plan:
        """``out[t] = sum_j weights[t, j] * expert_ids[t, j](x[t])``; returns the plan that served.

        x, out: [T, H], bf16 (or uint16 holding it) or f32, rows contiguous; weights: f32 [T, k]; ids: int32 or int64
        [T, k]; weights and ids contiguous. The caller has checked all that (`api`); nothing is checked here.
        ``module`` serves instead of the one that is looked up. x may have another number of rows that divides T * k:
        each then serves as many slots, in order.
        """
        module = module or self.module
        (T, k), rows = ids.shape, x.shape[0]
        count, wide = module.threads(), ids_wide(ids.dtype)
        row_slots = 0 if rows == T else T * k // rows
        p = self.plan(T, k, count, row_stride(x), row_stride(out), x_code(x.dtype), wide, on_input, row_slots)
        call(module, p, address(x), address(out), address(weights), address(ids))
        return p


def call(module: Module, p: Plan, x: int, out: int, weights: int, ids: int) -> None:
    """One call with everything at its address; the caller keeps the arrays alive."""
    if p.parts:
        for part, (x_from, out_from, weights_from, ids_from) in p.parts:
            call(module, part, x + x_from, out + out_from, weights + weights_from, ids + ids_from)
        return
    held, scratch = _scratch.take(p.scratch_bytes)  # a signal handler that calls us may replace the thread's array
    module.moe(p.pointer, x, out, weights, ids, scratch)
    del held


def parted(made: list[Plan], x_code: int, ids_wide: bool) -> Plan:
    """Plans of consecutive tokens as one; its values are those of the first."""
    F, first = plan.Field, made[0]
    size, top_k = (2, 4)[x_code], first[F.TOP_K]
    x, out = first[F.X_STRIDE] * size, first[F.OUT_STRIDE] * size
    weights, ids = top_k * 4, top_k * (8 if ids_wide else 4)
    tokens, rows = (accumulate([p[field] for p in made[:-1]], initial=0) for field in (F.TOKENS, F.X_ROWS))
    begins = zip(made, rows, tokens, strict=True)
    return replace(first, parts=tuple((p, (r * x, t * out, t * weights, t * ids)) for p, r, t in begins))


@cache
def x_code(dtype: Any) -> int:
    return X_CODES[dtype_name(dtype)]


@cache
def ids_wide(dtype: Any) -> bool:
    return dtype_name(dtype) == "int64"


def row_stride(array: Any) -> int:
    """Elements between rows of a 2-D array whose rows are contiguous."""
    if hasattr(array, "stride"):
        return array.stride(0)
    return array.strides[0] // array.itemsize if isinstance(array, np.ndarray) else array.strides[0]
