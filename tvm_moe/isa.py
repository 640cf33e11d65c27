"""CPU levels: what this CPU can execute, and which micro-kernel row serves a dtype.

Features come from CPUID and XGETBV (through the `cpu` module: /proc/cpuinfo shows the host under emulation) or from the
AArch64 HWCAPs. Everything takes the architecture and the features as arguments with detected defaults, so that each
choice can be tested on any host.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from . import kernels
from .errors import UnsupportedISAError
from .kernels import LADDER, MicroKernel, machine

ENVIRONMENT = "TVM_MOE_ISA"

# name -> (leaf, subleaf, register 0..3 = eax..edx, bit, XCR0 bits the operating system must have enabled)
_AVX, _AVX512, _AMX = 0x6, 0xE6, 0x60000
X86_BITS: dict[str, tuple[int, int, int, int, int]] = {
    "fma": (1, 0, 2, 12, _AVX),
    "f16c": (1, 0, 2, 29, _AVX),
    "bmi": (7, 0, 1, 3, 0),
    "bmi2": (7, 0, 1, 8, 0),
    "avx2": (7, 0, 1, 5, _AVX),
    "avx512f": (7, 0, 1, 16, _AVX512),
    "avx512dq": (7, 0, 1, 17, _AVX512),
    "avx512cd": (7, 0, 1, 28, _AVX512),
    "avx512bw": (7, 0, 1, 30, _AVX512),
    "avx512vl": (7, 0, 1, 31, _AVX512),
    "avx512_vnni": (7, 0, 2, 11, _AVX512),
    "avxvnni": (7, 1, 0, 4, _AVX),
    "avxvnniint8": (7, 1, 3, 4, _AVX),
    "avx512_bf16": (7, 1, 0, 5, _AVX512),
    "amx_tile": (7, 0, 3, 24, _AMX),
    "amx_int8": (7, 0, 3, 25, _AMX),
    "amx_bf16": (7, 0, 3, 22, _AMX),
}
AMX = frozenset(name for name, bits in X86_BITS.items() if bits[4] == _AMX)
# name -> (auxiliary vector entry, bit)
AARCH64_BITS = {"dotprod": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}


LOWER = "lower level than"  # the one reason that does not forbid a row


@dataclass(frozen=True)
class Choice:
    """The row that serves a dtype, and why each other row of this architecture does not."""

    kernel: MicroKernel
    rejected: tuple[tuple[MicroKernel, str], ...]

    @property
    def allowed(self) -> tuple[MicroKernel, ...]:
        """The rows this CPU executes and the cap allows, the best first."""
        return self.kernel, *(kernel for kernel, reason in self.rejected if reason.startswith(LOWER))


@cache
def features() -> frozenset[str]:
    """What this CPU and its operating system can execute, in the table's names."""
    return detected()[0]


@cache
def detected() -> tuple[frozenset[str], str]:
    """The features, and why the operating system refuses those of AMX that the CPU has ("": it does not)."""
    if machine() == "aarch64":
        return _aarch64_features(), ""
    found = x86_features(cpuid, lambda index: cpu_library().moe_xgetbv(index))
    refusal = request_tiles() if found & AMX else ""
    return found - AMX if refusal else found, refusal


def request_tiles() -> str:
    """Ask Linux for tile registers, for every thread of this process: nothing may use them before. Why not, "" if granted."""
    libc = ctypes.CDLL(None, use_errno=True)
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if libc.syscall(*map(ctypes.c_long, (arch_prctl, request_permission, tile_data))) == 0:
        return ""
    code = ctypes.get_errno()
    return f"the operating system refused permission to use AMX tiles: errno {code} ({os.strerror(code)})"


def refused(missing: frozenset[str]) -> str:
    """What the operating system said where it is the one to refuse some of these features, else ""."""
    return detected()[1] if missing & AMX else ""


def lack(missing: frozenset[str]) -> str:
    """Why these features are missing."""
    refusal = refused(missing)
    absent = ", ".join(sorted(missing - AMX if refusal else missing))
    return "; ".join(filter(None, (f"this CPU lacks {absent}" if absent else "", refusal)))


Registers = tuple[int, ...]  # eax, ebx, ecx, edx


@cache
def cpu_library() -> ctypes.CDLL:
    """The library with `moe_cpuid` and `moe_xgetbv`, built from a few lines of LLVM IR (compiler/launcher)."""
    from . import modules

    library = ctypes.CDLL(str(modules.find_cpu()))
    library.moe_cpuid.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p]
    library.moe_xgetbv.restype = ctypes.c_uint64
    return library


def cpuid(leaf: int, subleaf: int) -> Registers:
    registers = (ctypes.c_uint32 * 4)()
    cpu_library().moe_cpuid(leaf, subleaf, registers)
    return tuple(registers)


def brand() -> str:
    """The CPU's name as it gives it itself."""
    if machine() != "x86_64" or cpuid(0x80000000, 0)[0] < 0x80000004:
        return platform.processor() or machine()
    text = b"".join(r.to_bytes(4, "little") for leaf in range(3) for r in cpuid(0x80000002 + leaf, 0))
    return text.split(b"\0")[0].decode(errors="replace").strip()


def x86_features(read: Callable[[int, int], Registers], xgetbv: Callable[[int], int]) -> frozenset[str]:
    """The features of a CPU that answers CPUID with ``read`` and, if its system enabled it, XGETBV."""
    highest, subleaves = read(0, 0)[0], read(7, 0)[0]
    osxsave = read(1, 0)[2] >> 27 & 1
    enabled = xgetbv(0) if osxsave else 0
    return frozenset(
        name
        for name, (leaf, subleaf, register, bit, state) in X86_BITS.items()
        if leaf <= highest
        and (leaf != 7 or subleaf <= subleaves)
        and read(leaf, subleaf)[register] >> bit & 1
        and enabled & state == state
    )


def _aarch64_features() -> frozenset[str]:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return frozenset(name for name, (entry, bit) in AARCH64_BITS.items() if getauxval(entry) >> bit & 1)


def cap(arch: str) -> str | None:
    """The level ``TVM_MOE_ISA`` allows at most, None where it is unset; an unknown level is an error."""
    level = os.environ.get(ENVIRONMENT) or None
    if level is not None and level not in LADDER[arch]:
        raise UnsupportedISAError(f"{ENVIRONMENT}={level!r} is no level of {arch}; expected one of {LADDER[arch]}")
    return level


def choose(
    dtype: str, isa: str | None = None, *, arch: str | None = None, available: frozenset[str] | None = None
) -> Choice:
    """The best row for ``dtype`` at or below the cap; ``isa`` demands that level instead.

    Raises UnsupportedISAError where a demanded level is unknown, has no kernel, or needs features this CPU lacks.
    """
    arch = arch or machine()
    available = features() if available is None else available
    if isa is not None:
        return Choice(demand(dtype, isa, arch, available), ())
    ladder, limit = LADDER[arch], cap(arch)
    rejected, best = [], None
    for kernel in reversed(kernels.rows_for(arch, dtype)):
        missing = kernel.features - available
        if limit and ladder.index(kernel.isa) > ladder.index(limit):
            rejected.append((kernel, f"above the cap {ENVIRONMENT}={limit}"))
        elif missing:
            rejected.append((kernel, lack(missing)))
        elif best is None:
            best = kernel
        else:
            rejected.append((kernel, f"{LOWER} {best.isa}"))
    assert best is not None, "the generic rows need no features"
    return Choice(best, tuple(rejected))


def demand(dtype: str, isa: str, arch: str, available: frozenset[str]) -> MicroKernel:
    """The row of exactly ``isa``, or an error that says what is missing."""
    if isa not in LADDER[arch]:
        raise UnsupportedISAError(f"isa={isa!r} is no level of {arch}; expected one of {', '.join(LADDER[arch])}")
    rows = [k for k in kernels.rows_for(arch, dtype) if k.isa == isa]
    if not rows:
        levels = [k.isa for k in kernels.rows_for(arch, dtype)]
        raise UnsupportedISAError(f"isa={isa!r} has no {dtype} kernel in this version; expected one of {levels}")
    if missing := rows[0].features - available:
        refusal = f" ({refused(missing)})" if refused(missing) else ""
        raise UnsupportedISAError(
            f"isa={isa!r} needs the CPU feature{'s' * (len(missing) > 1)} {', '.join(sorted(missing))}, which this CPU or "
            f"its operating system lacks{refusal}; leave isa out to take the best level it can execute"
        )
    return rows[0]


def executable(kernel: MicroKernel) -> tuple[bool, str]:
    """Whether this CPU runs ``kernel``, and the reason where it does not."""
    if machine() not in kernel.arches:
        return False, f"{kernel.key} is for {', '.join(kernel.arches)}, this machine is {machine()}"
    missing = kernel.features - features()
    return not missing, lack(missing) if missing else ""
