"""Which quantized checkpoints can be read: compressed-tensors INT8, W8A8 with dynamic per-token activations."""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError
from .formats import Config

_ADVICE = "use a BF16 checkpoint (run can quantize it: --dtype int8) or a compressed-tensors int-quantized W8A8 one"
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_NAMES = {"mxfp4": "MXFP4", "fp8": "FP8", "gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes"}


def is_quantized(config: Config, where: str) -> bool:
    """False for plain weights, True for a supported scheme; CheckpointError names any other."""
    scheme = config.get("quantization_config") or config.get("compression_config")
    if not scheme:
        return False
    method = str(scheme.get("quant_method"))
    if method != "compressed-tensors":
        raise CheckpointError(f"{where}: {_NAMES.get(method, method)} weights are not supported; {_ADVICE}")
    for what, got, expected in _facts(scheme):
        if got != expected:
            message = f"compressed-tensors {what} is {got!r}, expected {expected!r}"
            raise CheckpointError(f"{where}: {message}; {_ADVICE}")
    return True


def _facts(scheme: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, got, expected) of everything that changes what the stored numbers mean."""
    groups = scheme.get("config_groups") or {}
    facts = [("format", scheme.get("format"), "int-quantized"), ("has config_groups", bool(groups), True)]
    facts.append(("transform_config", scheme.get("transform_config") or {}, {}))
    facts.append(("sparsity format", (scheme.get("sparsity_config") or {}).get("format", "dense"), "dense"))
    for name, group in groups.items():
        facts.append((f"{name} format", group.get("format") or "int-quantized", "int-quantized"))
        facts.append((f"{name} output_activations", group.get("output_activations"), None))
        for part, rules in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
            args = group.get(part) or {}
            facts += [(f"{name} {part} {key}", args.get(key), value) for key, value in rules.items()]
    return facts
