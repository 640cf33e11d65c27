"""Tuned decisions: what `tvm-moe tune` found for this CPU, looked up by stage, K and rows. Plain data; needs no compiler.

A task is one (kernel, stage, K, rows): the GEMM tile of ``rows`` rows with a K of H (gate/up) or I (down). A record holds the
schedule decisions that beat the defaults there. `tune_logs/<cpu>/` holds a manifest of the records and, for whoever wants
to go on tuning, MetaSchedule's own database of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import isa
from .errors import MoEError
from .kernels import MicroKernel, by_name

FORMAT = 2  # raise when a key of the manifest changes its meaning
LOGS, ENVIRONMENT = Path(__file__).parent / "tune_logs", "TVM_MOE_TUNE_LOGS"
STAGES = ("gate_up", "down")
MANIFEST = "manifest.json"
Decisions = tuple[tuple[str, int], ...]  # (name, value), sorted; empty: the schedule's defaults


@dataclass(frozen=True)
class Record:
    """Decisions that won; what the default and the tuned tile cost, in the unit of the manifest."""

    kernel: str  # name of the micro-kernel row
    stage: str
    K: int
    rows: int
    decisions: Decisions
    default: float
    tuned: float


@dataclass(frozen=True)
class Logs:
    cpu: str
    records: tuple[Record, ...]
    path: Path | None = None


@dataclass(frozen=True)
class Choice:
    """Decisions of every tile of a module, [stage][rows], and where each comes from."""

    decisions: dict[str, dict[int, Decisions]]
    sources: dict[str, dict[int, str]]

    @property
    def variant(self) -> str:
        """Names the module: equal decisions share one. "" is the module of all defaults."""
        if not any(d for tiles in self.decisions.values() for d in tiles.values()):
            return ""
        return hashlib.sha256(repr(sorted_items(self.decisions)).encode()).hexdigest()[:8]


def sorted_items(decisions: dict[str, dict[int, Decisions]]) -> list[Any]:
    return [(stage, sorted(tiles.items())) for stage, tiles in sorted(decisions.items())]


def choose(kernel: MicroKernel, hidden: int, intermediate: int, logs: Logs | None = None) -> Choice:
    """For a layer of these sizes on this CPU: of each tile the record of the same K, else of the nearest, else defaults."""
    logs = logs or this_cpu()
    K = {"gate_up": hidden, "down": intermediate}
    found = {s: {r: nearest(kernel, s, K[s], r, logs.records) for r in kernel.rows} for s in STAGES}
    return Choice(
        {s: {r: record.decisions if record else () for r, record in tiles.items()} for s, tiles in found.items()},
        {s: {r: source(record, K[s], r) for r, record in tiles.items()} for s, tiles in found.items()},
    )


def nearest(kernel: MicroKernel, stage: str, K: int, rows: int, records: Iterable[Record]) -> Record | None:
    """The record whose rows, then whose K are nearest by ratio; smaller ones where two are as near."""
    fitting = [r for r in records if (r.kernel, r.stage) == (kernel.name, stage)]
    return min(fitting, key=lambda r: (ratio(r.rows, rows), ratio(r.K, K), r.rows, r.K), default=None)


def ratio(a: int, b: int) -> float:
    return abs(math.log(a / b))


def source(record: Record | None, K: int, rows: int) -> str:
    if record is None:
        return "default"
    exact = (record.K, record.rows) == (K, rows)
    values = ", ".join(f"{name}={value}" for name, value in record.decisions) or "the defaults won"
    return f"{'tuned' if exact else f'nearest record (K {record.K}, {record.rows} rows)'}: {values}"


def cpu_key() -> list[Any]:
    """[vendor, family, model / 16] of this CPU, by which logs say whose they are; [] where it does not tell.

    On AArch64 [implementer, part, 0], of `ARM_CPUS` for instance.
    """
    if isa.machine() != "x86_64":
        return arm_key(Path("/proc/cpuinfo"))
    _, b, c, d = isa.cpuid(0, 0)
    vendor = b"".join(r.to_bytes(4, "little") for r in (b, d, c)).decode("ascii", "replace")
    signature = isa.cpuid(1, 0)[0]
    family, model = signature >> 8 & 0xF, signature >> 4 & 0xF
    return [vendor, family + (signature >> 20 & 0xFF) if family == 0xF else family, signature >> 16 & 0xF or model]


# Parts of Arm's CPUs with i8mm and bf16, the level that is worth tuning.
ARM_CPUS = {"neoverse-v1": 0xD40, "neoverse-n2": 0xD49, "neoverse-v2": 0xD4F}


def named_arm_key(name: str) -> list[Any]:
    """The key of an Arm CPU by LLVM's name of it."""
    if name not in ARM_CPUS:
        raise MoEError(f"unknown CPU {name!r}; expected one of {', '.join(ARM_CPUS)}")
    return ["0x41", ARM_CPUS[name], 0]


def arm_key(cpuinfo: Path) -> list[Any]:
    """Of the first core that Linux lists."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return []
    implementer, part = (
        re.search(rf"^CPU {name}\s*:\s*(0x[0-9a-f]+)$", text, re.M) for name in ("implementer", "part")
    )
    return [implementer[1], int(part[1], 16), 0] if implementer and part else []


@cache
def this_cpu() -> Logs:
    """The logs that were made on this kind of CPU; without records where there are none.

    Looked for in the folder that TVM_MOE_TUNE_LOGS names, a log or one of logs, then in the package.
    """
    for manifest in manifests():
        if read_json(manifest).get("cpu_key") == cpu_key():
            return read(manifest.parent)
    return Logs("", ())


def manifests() -> Iterator[Path]:
    if explicit := os.environ.get(ENVIRONMENT):
        if not Path(explicit).is_dir():
            raise MoEError(f"{ENVIRONMENT}={explicit} is no folder; unset it or tune with tvm-moe tune --out")
        yield from sorted([*Path(explicit).glob(MANIFEST), *Path(explicit).glob(f"*/{MANIFEST}")])
    yield from sorted(LOGS.glob(f"*/{MANIFEST}"))


def variants(kernel: MicroKernel, logs: Logs) -> dict[str, Choice]:
    """Every module that layers can ask for with these logs, by variant; a K that was not tuned takes one that was."""
    Ks = {s: sorted({r.K for r in logs.records if (r.kernel, r.stage) == (kernel.name, s)}) or [1] for s in STAGES}
    choices = (choose(kernel, hidden, intermediate, logs) for hidden in Ks["gate_up"] for intermediate in Ks["down"])
    found = {choice.variant: choice for choice in choices}
    found.pop("", None)
    return found


def all_logs() -> list[Logs]:
    """Those of every CPU, for whoever builds modules to ship."""
    return [read(manifest.parent) for manifest in manifests()]


def read(folder: Path) -> Logs:
    """The records in ``folder``; an error that names the file and what is wrong with it."""
    manifest = folder / MANIFEST
    data = read_json(manifest)
    if data.get("format") != FORMAT:
        raise MoEError(f"{manifest}: format {data.get('format')!r}, expected {FORMAT}; tune again with tvm-moe tune")
    try:
        records = tuple(record(entry) for entry in data["records"])
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise MoEError(f"{manifest}: a record is damaged ({error!r}); tune again with tvm-moe tune") from error
    for r in records:
        if by_name(r.kernel) is None or r.stage not in STAGES:
            raise MoEError(f"{manifest}: a record of {r.kernel}, {r.stage} is of another version; tune again")
    return Logs(str(data.get("cpu", folder.name)), records, folder)


def record(entry: dict[str, Any]) -> Record:
    decisions = tuple(sorted((str(name), int(value)) for name, value in entry["decisions"].items()))
    numbers = {name: float(entry[name]) for name in ("default", "tuned")}
    if not all(0 < v < math.inf for v in numbers.values()) or min(entry["K"], entry["rows"]) < 1:
        raise ValueError(f"K, rows and times must be positive, got {entry}")
    return Record(entry["kernel"], entry["stage"], int(entry["K"]), int(entry["rows"]), decisions, **numbers)


def write(folder: Path, about: dict[str, Any], records: Iterable[Record]) -> None:
    """The manifest, whole or not at all."""
    entries = [asdict(r) | {"decisions": dict(r.decisions)} for r in records]
    text = json.dumps({"format": FORMAT, **about, "records": entries}, indent=1)
    made = folder / f"{MANIFEST}.tmp"
    made.write_text(text + "\n")
    made.replace(folder / MANIFEST)


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise MoEError(f"{path} cannot be read as a tune log ({error}); delete it or tune again") from error
    if not isinstance(data, dict):
        raise MoEError(f"{path} holds a {type(data).__name__}, expected an object; delete it or tune again")
    return data
