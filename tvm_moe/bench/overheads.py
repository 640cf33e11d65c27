"""What a call, an import and a module cost besides the work, each measured in a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PROCESSES, BATCHES, CALLS = 3, 21, 200
# Imports are timed before anything of the benchmark is loaded.
CHILD = """
import json, sys, time
import torch
start = time.perf_counter()
import tvm_moe
tvm_moe.pack_experts, tvm_moe.fused_moe
imported = time.perf_counter() - start
from tvm_moe.bench import overheads
print(json.dumps({"import_ms": imported * 1e3, **overheads.child(*json.loads(sys.argv[1]))}))
"""


def measure(dtypes: tuple[str, ...], count: int, isa: str | None) -> dict[str, dict[str, float]]:
    """For each dtype, medians over fresh processes; times in ms, of steady calls in microseconds."""
    return {dtype: medians([process(dtype, count, isa) for _ in range(PROCESSES)]) for dtype in dtypes}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def process(dtype: str, count: int, isa: str | None) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, json.dumps([dtype, count, isa])]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def child(dtype: str, count: int, isa: str | None) -> dict[str, float]:
    """Detect features, choose and load a module that exists already, call it first, without tokens and with one; tiny."""
    import torch

    import tvm_moe

    from .. import isa as levels
    from .. import runtime
    from ..models import LayerShape
    from .layers import Source

    torch.set_num_threads(count)
    tvm_moe.set_num_threads(count)
    detected = seconds(levels.features)
    loaded = seconds(lambda: runtime.load(levels.choose(dtype, isa).kernel))
    shape = LayerShape("tiny", 64, 32, 2, 1)
    experts = tvm_moe.pack_experts(**Source(shape, dtype).stacked(), isa=isa)
    x, weights, ids = torch.randn(1, 64).bfloat16(), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    first = seconds(lambda: tvm_moe.fused_moe(x, experts, weights, ids))
    empty = x[:0], experts, weights[:0], ids[:0]
    return {
        "detect_ms": detected * 1e3,
        "load_ms": loaded * 1e3,
        "first_call_ms": first * 1e3,
        "empty_call_us": steady(lambda: tvm_moe.fused_moe(*empty)) * 1e6,
        "one_token_us": steady(lambda: tvm_moe.fused_moe(x, experts, weights, ids)) * 1e6,
        **ways(experts, x, weights, ids),
    }


def ways(experts: Any, *inputs: Any) -> dict[str, float]:
    """To call a layer: by the compiled function alone, a module, the operator; torch as a process finds it, gradients on."""
    import torch

    from .. import ops, runtime
    from ..layers import Experts

    (x, weights, ids), module = inputs, Experts(experts)
    out = torch.empty_like(x)
    plan = experts.layer.run(x, out, weights, ids)
    addresses = [t.data_ptr() for t in (x, out, weights, ids)]
    packed = ops.tensors(experts), experts.layer.description
    return {
        "compiled_us": steady(lambda: runtime.call(experts.layer.module, plan, *addresses)) * 1e6,
        "module_us": steady(lambda: module(x, weights, ids)) * 1e6,
        "operator_us": steady(lambda: ops.FUSED_MOE(x, *packed, weights, ids)) * 1e6,
    }


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def steady(call: Callable[[], Any]) -> float:
    """Of one call, the median over batches."""
    return statistics.median(seconds(lambda: [call() for _ in range(CALLS)]) / CALLS for _ in range(BATCHES))
