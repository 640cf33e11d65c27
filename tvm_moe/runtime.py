"""Load a kernel module and run a layer with it, from apache-tvm-ffi alone. Takes any DLPack array; needs no torch."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from . import modules, plan, threads
from .activations import ActivationSpec
from .errors import ModuleError
from .kernels import MicroKernel
from .plan import LayerSizes

X_CODES = {"bfloat16": 0, "uint16": 0, "float32": 1}  # storage of hidden_states and output; uint16 holds bf16
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

    def threads(self) -> int:
        """Threads for the next call, with the team put in place."""
        count = threads.get_num_threads()
        if self._gomp.value is None:
            self._gomp.value = threads.team()
        return count


class Module(Library):
    """A layer's functions."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ("moe", "pack", "check_panel"))
        self.moe, self.pack, self.check_panel = self.functions.values()


@cache
def load(kernel: MicroKernel) -> Module:
    """The module of ``kernel`` for this machine, found or built by `modules.find`."""
    return Module(modules.find(kernel))


def address(array: Any) -> int:
    """Address of the first element of a CPU array (torch, numpy, or anything with DLPack)."""
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return tvm_ffi.from_dlpack(array).data_ptr()


def dtype_name(array: Any) -> str:
    return str(array.dtype).rsplit(".", 1)[-1]


class Scratch(threading.local):
    """Working memory of the calling thread: grows, is reused, and so costs steady-state calls nothing."""

    def __init__(self) -> None:
        self.array, self.start, self.size = np.empty(0, np.uint8), 0, 0

    def pointer(self, size: int) -> ctypes.c_void_p:
        if size > self.size:
            self.array = np.empty(size + 64, np.uint8)
            self.size, self.start = size, -(-self.array.ctypes.data // 64) * 64
        return ctypes.c_void_p(self.start)


_scratch = Scratch()


@dataclass(frozen=True)
class Layer:
    """A packed layer as the module sees it: the row that packed it, its sizes, its arrays (`ARRAYS`, kept alive here)."""

    kernel: MicroKernel
    sizes: LayerSizes
    activation: ActivationSpec
    arrays: dict[str, Any]
    _pointers: tuple[ctypes.c_void_p, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pointers", tuple(ctypes.c_void_p(address(self.arrays[n])) for n in ARRAYS))

    def run(
        self, x: Any, out: Any, weights: Any, ids: Any, on_input: bool = False, module: Module | None = None
    ) -> None:
        """``out[t] = sum_j weights[t, j] * expert_ids[t, j](x[t])``.

        x, out: [T, H], bf16 (or uint16 holding it) or f32, rows contiguous; weights: f32 [T, k]; ids: int32 or int64
        [T, k]; weights and ids contiguous. The caller has checked all that (`api`); nothing is checked here.
        ``module`` serves instead of the one `load` finds.
        """
        module = module or load(self.kernel)
        (tokens, top_k), width = ids.shape, X_CODES[dtype_name(x)]
        p = plan.make(self.kernel, self.sizes, tokens, top_k, module.threads(), row_stride(x), row_stride(out))
        pointer = ctypes.c_void_p
        module.moe(
            pointer(address(x)), pointer(address(out)), pointer(address(weights)), pointer(address(ids)),
            *self._pointers, _scratch.pointer(p.scratch_bytes), pointer(p.address),
            width, dtype_name(ids) == "int64", on_input,
            self.activation.kind.code, self.activation.alpha, self.activation.limit,
        )  # fmt: skip


def row_stride(array: Any) -> int:
    """Elements between rows of a 2-D array whose rows are contiguous."""
    if hasattr(array, "stride"):
        return array.stride(0)
    return array.strides[0] // array.itemsize
