"""The micro-kernel table: one row per (ISA level, dtype); selection, packing, building, tests and listings read it.

Plain data, no imports beyond the standard library. A micro-kernel multiplies up to `rows[-1]` gathered activation rows
with one packed weight panel of `NR` output columns. The packed layout of a matrix ``[E, N, K]`` is
``[E, panels, K / group, NR, group]``: a K group of a column is contiguous (what one lane of the instruction eats) and the
panel streams through memory in the order the kernel reads it, filled up with zeros where K ends within a step of it. The
layout is a function of the row alone, so that tuning never changes it. In a gate/up matrix a panel holds NR/2 gate columns,
then the NR/2 up columns that belong to them.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import MoEError, UnsupportedISAError

LADDER = {
    "x86_64": ("generic", "avx2", "avxvnni", "avxvnniint8", "avx512", "avx512_vnni", "amx"),
    "aarch64": ("generic", "dotprod", "i8mm_bf16"),
}
DTYPES = ("int8", "bf16")
ITEMSIZE = {"int8": 1, "uint8": 1, "int16": 2, "uint16": 2}  # of operand types


@dataclass(frozen=True)
class MicroKernel:
    """One row of the table."""

    isa: str  # level of the ladder in `isa`
    dtype: str  # "int8" (W8A8) or "bf16"
    activation: str  # operand type of the activations as the kernel reads them
    weight: str  # operand type of the packed weights
    accumulator: str
    rows: tuple[int, ...]  # row-count variants, ascending: every count in 1..MR, so that no row is computed in vain
    NR: int  # columns of a panel
    group: int  # K group: consecutive k one instruction lane consumes
    offset: int  # added to the quantized activation (u8 = s8 + 128); folded back through the packed start values
    intrinsic: str | None  # file in compiler/intrin; None: LLVM vector code
    style: str  # class in schedules/
    features: frozenset[str]  # CPU features the object code needs beyond the baseline
    target: tuple[tuple[str, str], ...]  # architecture -> mcpu, or "+feature,..." as LLVM names them ("": the baseline)
    # Activation rows one instruction reads. Where it is more than one, the rows of a tile lie interleaved, [K steps, rows,
    # step], filled up to a multiple of it with a repeated row (but where a tile can be shaped for fewer, see
    # intrin.ThreadState); a row alone lies as it is, and its tile repeats it.
    row_group: int = 1
    depth: int = 1  # K groups of a row one instruction reads, a K step: panels are padded to whole ones
    registers: int = 32  # vector registers the instruction can name
    lone_ahead: int = 0  # bytes ahead that a tile alone on its panel prefetches; 0: the hardware foresees enough
    model: str = ""  # CPU whose LLVM model schedules the code, "name,-feature,...": less what it has beyond the level
    few: MicroKernel | None = None  # a row of the same operands and panels; its tiles serve up to its MR rows, gathered

    def __post_init__(self) -> None:
        if self.rows != tuple(sorted({*range(1, self.loose + 1), *range(self.row_group, self.MR + 1, self.row_group)})):
            raise MoEError(f"{self.isa}/{self.dtype}: rows must be 1 and row_group..MR by row_group, got {self.rows}")
        if self.NR % 32 or self.group * self.weight_size not in (2, 4, 8):
            raise MoEError(f"{self.name}: NR must be a multiple of 32 and a K group 2, 4 or 8 bytes")
        if self.few and (self.few.operands != self.operands or self.few.row_group > 1):
            raise MoEError(f"{self.name}: few rows are served by {self.few.name}, which reads other operands or panels")

    @property
    def MR(self) -> int:
        return self.rows[-1]

    @property
    def loose(self) -> int:
        """Rows of a block up to which they are not interleaved (where any are)."""
        return self.few.MR if self.few else 1

    @property
    def operands(self) -> tuple[object, ...]:
        return self.activation, self.weight, self.accumulator, self.NR, self.group, self.offset

    def serving(self, rows: int) -> MicroKernel:
        """The row whose tile serves so many rows."""
        return self.few if self.few and rows <= self.few.MR else self

    @property
    def k_step(self) -> int:
        """Consecutive k of a row that one instruction reads."""
        return self.depth * self.group

    def k_groups(self, K: int) -> int:
        """K groups of a panel of K columns: whole steps."""
        return -(-K // self.k_step) * self.depth

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.activation}x{self.weight}_{self.MR}x{self.NR}x{self.group}_{self.isa}"

    @property
    def key(self) -> str:
        """What modules of this row are called."""
        return f"{self.isa}-{self.dtype}"

    @property
    def weight_size(self) -> int:
        """Bytes of a packed weight."""
        return ITEMSIZE[self.weight]

    @property
    def activation_size(self) -> int:
        """Bytes of an activation as the kernel reads it."""
        return ITEMSIZE[self.activation]

    @property
    def fused(self) -> bool:
        """Whether its CPUs multiply and add with one rounding: all beyond the baselines do."""
        return bool(self.features)

    @property
    def arches(self) -> tuple[str, ...]:
        return tuple(arch for arch, _ in self.target)

    def mcpu(self, arch: str) -> str:
        return dict(self.target)[arch]


def _plus(features: Iterable[str]) -> str:
    return ",".join(f"+{f}" for f in sorted(features))


def _zmm(isa: str, dtype: str, more: set[str], target: str, rows: int, **row: object) -> MicroKernel:
    """32 zmm registers: rows * 4 accumulators, 4 weight vectors (twice that where they are widened to f32), a broadcast.

    Six rows leave 3 free (vnni) or the 2 that vpmaddwd needs for its products; widened bf16 leaves room for five.
    """
    row |= {"features": _AVX512 | more, "target": (("x86_64", target),)}
    return MicroKernel(isa, dtype, rows=tuple(range(1, rows + 1)), NR=64, style="OuterProduct", **row)  # type: ignore[arg-type]


def _vnni_int8(rows: int) -> MicroKernel:
    return _zmm(
        "avx512_vnni", "int8", {"avx512_vnni"}, "cascadelake", rows, activation="uint8", weight="int8",
        accumulator="int32", group=4, offset=128, intrinsic="vnni",
    )  # fmt: skip


def _ymm(isa: str, dtype: str, more: set[str], rows: int, **row: object) -> MicroKernel:
    """Sixteen ymm registers: rows * 4 accumulators, a weight vector (two where it is widened), and each row's broadcast.

    Six rows of vpmaddwd take half of the columns at a time: 12 accumulators, 2 weight vectors, a broadcast and a product.
    """
    features = _AVX2 | more
    row |= {"features": features, "target": (("x86_64", _plus(features)),), "registers": 16}
    return MicroKernel(isa, dtype, rows=tuple(range(1, rows + 1)), NR=32, style="OuterProduct", **row)  # type: ignore[arg-type]


def _amx(dtype: str, more: set[str], **row: object) -> MicroKernel:
    """32x64 by 2x2 tiles of sums: twice half of a panel. 16x64 by 1x4; all of a K step is 64 bytes."""
    features = _AVX512 | {"amx_tile"} | more
    names = (f.replace("avx512_", "avx512").replace("amx_", "amx-") for f in features)  # as LLVM has them
    row |= {"features": features, "target": (("x86_64", _plus(names)),)}
    return MicroKernel("amx", dtype, NR=64, style="TileProduct", row_group=16, depth=16, **row)  # type: ignore[arg-type]


def _arm(isa: str, dtype: str, features: set[str], **row: object) -> MicroKernel:
    target = (("aarch64", _plus(features)),)
    return MicroKernel(isa, dtype, features=frozenset(features), target=target, **row)  # type: ignore[arg-type]


# Graviton 3 and 4, Grace. LLVM's generic model is an in-order core's: 0.8 % (INT8) and 0.1 % (BF16) more instructions at 64
# tokens.
_NEOVERSE = "neoverse-512tvb,-sve,-lse,-rcpc,-rdm,-fullfp16,-pauth,-complxnum,-jsconv,-flagm,-rand,-sha3,-sm4"


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_ANY = (("x86_64", ""), ("aarch64", ""))

TABLE: tuple[MicroKernel, ...] = (
    # Baseline SSE2 / NEON: 2x32 is 16 vectors of 4 lanes on NEON; on SSE2 some of them spill, which costs less than
    # narrower panels would cost every other loop.
    MicroKernel("generic", "int8", "int8", "int8", "int32", (1, 2), 32, 4, 0, None, "OuterProduct", frozenset(), _ANY),
    MicroKernel("generic", "bf16", "uint16", "uint16", "float32", (1, 2), 32, 2, 0, None, "OuterProduct", frozenset(), _ANY),
    # Activations as 16-bit integers: widened once, when they are quantized, not for every panel that they meet.
    _ymm(
        "avx2", "int8", set(), 6, activation="int16", weight="int8", accumulator="int32", group=2, offset=0,
        intrinsic="pmaddwd", lone_ahead=8192,
    ),
    _ymm(
        "avx2", "bf16", set(), 2, activation="uint16", weight="uint16", accumulator="float32", group=2, offset=0,
        intrinsic="fma",
    ),
    _ymm(
        "avxvnni", "int8", {"avxvnni"}, 3, activation="uint8", weight="int8", accumulator="int32", group=4, offset=128,
        intrinsic="avxvnni",
    ),
    _ymm(
        "avxvnniint8", "int8", {"avxvnniint8"}, 3, activation="int8", weight="int8", accumulator="int32", group=4,
        offset=0, intrinsic="avxvnniint8",
    ),
    # Skylake-X; its BF16 also serves VNNI CPUs without AVX512-BF16 (Cascade Lake, Ice Lake).
    _zmm(
        "avx512", "int8", set(), _plus(_AVX512), 6, activation="int16", weight="int8", accumulator="int32", group=2,
        offset=0, intrinsic="pmaddwd512", lone_ahead=8192,
    ),
    _zmm(
        "avx512", "bf16", set(), _plus(_AVX512), 5, activation="uint16", weight="uint16", accumulator="float32", group=2,
        offset=0, intrinsic="fma512",
    ),
    _vnni_int8(6),
    _zmm(
        "avx512_vnni", "bf16", {"avx512_vnni", "avx512_bf16"}, "cooperlake", 6, activation="uint16", weight="uint16",
        accumulator="float32", group=2, offset=0, intrinsic="avx512bf16",
    ),
    # A K step of a panel takes 64 cycles for up to 16 rows, and 32 a row by vpdpbusd.
    _amx(
        "int8", {"avx512_vnni", "amx_int8"}, activation="uint8", weight="int8", accumulator="int32", group=4, offset=128,
        rows=(1, 2, 16, 32), intrinsic="tdpbusd", few=_vnni_int8(2),
    ),
    _amx(
        "bf16", {"amx_bf16"}, activation="uint16", weight="uint16", accumulator="float32", group=2, offset=0,
        rows=(1, 16, 32), intrinsic="tdpbf16ps",
    ),
    # 2x32 is 16 of 32 registers; with 24 accumulators LLVM moves and spills them.
    _arm(
        "dotprod", "int8", {"dotprod"}, activation="int8", weight="int8", accumulator="int32", rows=(1, 2), NR=32,
        group=4, offset=0, intrinsic="sdot", style="OuterProduct",
    ),
    _arm(
        "i8mm_bf16", "int8", {"dotprod", "i8mm", "bf16"}, activation="int8", weight="int8", accumulator="int32",
        rows=(1, 2, 4, 6, 8, 10, 12), NR=32, group=8, offset=0, intrinsic="smmla", style="PairProduct", row_group=2,
        model=_NEOVERSE,
    ),
    _arm(
        "i8mm_bf16", "bf16", {"dotprod", "i8mm", "bf16"}, activation="uint16", weight="uint16", accumulator="float32",
        rows=(1, 2, 4, 6, 8, 10, 12), NR=32, group=4, offset=0, intrinsic="bfmmla", style="PairProduct", row_group=2,
        model=_NEOVERSE,
    ),
)  # fmt: skip


def machine() -> str:
    """This machine's architecture as the ladder names it."""
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    if arch not in LADDER:
        raise UnsupportedISAError(f"architecture {arch!r} is not supported; expected one of {sorted(LADDER)}")
    return arch


def rows_for(arch: str, dtype: str) -> tuple[MicroKernel, ...]:
    """The kernels of an architecture and dtype, lowest level first (the table is in ladder order)."""
    return tuple(k for k in TABLE if k.dtype == dtype and arch in k.arches)


def find(isa: str, dtype: str) -> MicroKernel:
    """The row of a level and dtype; an error that lists what exists otherwise."""
    for kernel in TABLE:
        if (kernel.isa, kernel.dtype) == (isa, dtype):
            return kernel
    raise MoEError(f"no kernel for isa={isa!r}, dtype={dtype!r}; existing: {', '.join(k.key for k in TABLE)}")


def dtypes_of(isa: str | None) -> tuple[str, ...]:
    """The dtypes a level has rows for (None: all dtypes); all where it is unknown, so that looking for it says so."""
    return tuple(d for d in DTYPES if isa is None or any((k.isa, k.dtype) == (isa, d) for k in TABLE)) or DTYPES


def find_on(arch: str, isa: str, dtype: str) -> MicroKernel:
    """The row of a level of that architecture, whatever this machine is."""
    kernel = find(isa, dtype)
    if arch not in kernel.arches:
        raise MoEError(f"isa={isa!r} is no level of {arch}; expected one of {', '.join(LADDER[arch])}")
    return kernel


def by_name(name: str) -> MicroKernel | None:
    """The row that is called ``name`` (what packed files and module manifests record)."""
    return next((kernel for kernel in TABLE if kernel.name == name), None)
