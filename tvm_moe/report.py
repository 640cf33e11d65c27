"""`explain` and ``tvm-moe show-config``: which CPU, level, module, kernels and threads serve, what was rejected, and why."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any

from . import isa, kernels, modules, plan, threads, tuning
from .errors import ModuleError, MoEError
from .kernels import MicroKernel

PACKAGES = ("tvm_moe", "apache-tvm-ffi", "apache-tvm", "torch", "numpy", "safetensors")

NOTHING_RUNS = "no kernel can run here"


def configuration() -> dict[str, Any]:
    """Everything `explain` says, as plain data."""
    return {
        "cpu": isa.brand(),
        "architecture": isa.machine(),
        "features": sorted(isa.features()),
        "isa_cap": isa.cap(isa.machine()),
        "kernels": {dtype: choice(dtype) for dtype in kernels.DTYPES},
        "threads": thread_configuration(),
        "slow_paths": threads.said(),
        "versions": {name: version(name) for name in PACKAGES} | {"python": sys.version.split()[0]},
    }


def choice(dtype: str) -> dict[str, Any]:
    chosen = isa.choose(dtype)
    return {
        **describe(chosen.kernel),
        "rejected": {kernel.isa: reason for kernel, reason in chosen.rejected},
    }


def describe(kernel: MicroKernel) -> dict[str, Any]:
    """A row, and the module file that serves it (None: it would be built at first use)."""
    return {"isa": kernel.isa, "kernel": kernel.name, "module": module_path(kernel), "tuning": "shape-generic defaults"}


def tuning_lines(layer: Any) -> list[str]:
    """What the tune logs of this CPU say about the layer's shape, and whether a module with their decisions serves it."""
    chosen, logs = layer.tuning, tuning.this_cpu()
    if not logs.records:
        return ["  tuning: no logs for this CPU (tvm-moe tune makes them); the schedules' defaults serve"]
    if not chosen.variant:
        return [f"  tuning: by the logs of {logs.cpu} the defaults are best here"]
    built = modules.find_tuned(layer.kernel, chosen.variant)
    state = f"module {built}" if built else "NOT BUILT, the defaults serve: run tvm-moe build --tuned"
    lines = [f"  tuning: variant {chosen.variant} by the logs of {logs.cpu}, {state}"]
    for stage, tiles in chosen.sources.items():
        lines += [f"    {stage}, {rows} rows: {source}" for rows, source in tiles.items()]
    return lines


def module_path(kernel: MicroKernel) -> str | None:
    """The file that serves the row, checked as loading would check it."""
    try:
        path = modules.existing(kernel)
        return str(modules.find(kernel)) if path else None
    except (ModuleError, OSError) as error:
        return f"REFUSED: {error}"


def thread_configuration() -> dict[str, Any]:
    quota = threads.quota()
    return {
        "next_call": threads.get_num_threads(),
        "affinity": len(os.sched_getaffinity(0)),
        "cgroup_quota": None if quota == sys.maxsize else quota,
        "torch": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
        "team": "the process's OpenMP threads (GOMP_parallel)" if threads.team() else "none: serial",
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def explain(experts: Any = None) -> str:
    """What serves a layer on this machine and why, for people.

    With ``experts``, PackedExperts or a module that holds some (a block, a whole model), also what serves exactly those.
    """
    packed = [] if experts is None else packed_in(experts)
    try:
        c = configuration()
    except ModuleError as error:  # not even the library that reads CPUID: nothing can run, which is what to explain
        return f"{NOTHING_RUNS}: {error}"
    lines = [
        f"CPU        {c['cpu']} ({c['architecture']})",
        f"features   {' '.join(c['features']) or 'baseline only'}",
        f"cap        {isa.ENVIRONMENT}={c['isa_cap']}"
        if c["isa_cap"]
        else f"cap        none ({isa.ENVIRONMENT} unset)",
    ]
    for dtype, chosen in c["kernels"].items():
        lines.append(f"{dtype:<10} {kernel_line(chosen)}")
        lines += [f"           rejected {level}: {reason}" for level, reason in chosen["rejected"].items()]
        seen = (chosen["isa"], *chosen["rejected"])
        without = [level for level in kernels.LADDER[c["architecture"]] if level not in seen]
        lines += [f"           levels without a {dtype} kernel: {', '.join(without)}"] if without else []
    t = c["threads"]
    lines.append(
        f"threads    {t['next_call']} on {t['team']} (torch {t['torch']}, affinity {t['affinity']}, "
        f"cgroup quota {t['cgroup_quota'] or 'none'})"
    )
    lines += [f"slow path  {message}" for message in c["slow_paths"]]
    lines.append("versions   " + ", ".join(f"{name} {v}" for name, v in c["versions"].items() if v))
    return "\n".join([*lines, *(line for layer in packed for line in expert_lines(layer))])


def packed_in(holder: Any) -> list[Any]:
    """PackedExperts, or those of a module's layers, alike ones once."""
    if hasattr(holder, "layer"):
        return [holder]
    modules = holder.modules() if callable(getattr(holder, "modules", None)) else ()
    found = {m.description: m.packed for m in modules if hasattr(m, "description") and hasattr(m, "packed")}
    if not found:
        raise MoEError(
            f"experts must be PackedExperts, a module that holds some, or None; got {type(holder).__name__} without any"
        )
    return list(found.values())


def kernel_line(chosen: dict[str, Any]) -> str:
    module = chosen["module"] or f"to be built at first use in {modules.cache_folder()}"
    return f"{chosen['isa']}, kernel {chosen['kernel']}, {chosen['tuning']}, module {module}"


def expert_lines(experts: Any) -> list[str]:
    """The row that packed these experts, and how calls of some token counts are cut."""
    layer = experts.layer
    lines = [repr(experts), f"  packed for and served by {kernel_line(describe(layer.kernel))}"]
    lines += tuning_lines(layer)
    best = isa.choose(layer.kernel.dtype).kernel
    if best is not layer.kernel:
        lines.append(f"  isa=None would take {best.isa} here now")
    count = threads.get_num_threads()
    top_k = min(8, layer.sizes.experts)
    for tokens in (1, 64, 1024, 4096):
        parts = plan.parts(layer.kernel, layer.sizes, tokens, top_k, count)
        cut = plan.split(layer.kernel, layer.sizes, parts[-1][1] - parts[-1][0], top_k, count)
        lines.append(
            f"  {tokens:>4} tokens, with {top_k} experts each, in {len(parts)} part{'s' * (len(parts) > 1)}: blocks of up to "
            f"{cut[plan.Field.ROW_BLOCK]} rows, work items of {cut[plan.Field.GROUP13]} gate/up and "
            f"{cut[plan.Field.GROUP2]} down panels"
        )
    return lines
