"""Our experts as vLLM's experts classes, one for each kind of weights.

Only `register` leads here: this module imports vLLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.zentorch_utils import is_zentorch_moe_config_supported
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt8DynamicTokenSym, kInt8StaticChannelSym
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from ... import isa, runtime, threads
from ...api import IO_DTYPES, pack_experts
from ...errors import MoEError
from ...layers import Experts
from . import ENVIRONMENT, setting
from .activations import SERVED, pack_options

logger = init_logger("vllm.tvm_moe")  # vLLM shows what is logged below its own name


class TVMMoEExperts(mk.FusedMoEExpertsModular):
    """Packed experts behind vLLM's modular interface: vLLM routes; the kernel weights and sums the slots.

    After loading the weights are packed, and the layer's own become empty [E, N, 0]: memory holds them once.
    """

    dtype: ClassVar[str]
    in_dtypes: ClassVar[tuple[torch.dtype, ...]]
    experts: Experts | None = None

    @staticmethod
    def is_supported_config(
        cls: type[TVMMoEExperts],  # vLLM passes the class by hand
        moe_config: FusedMoEConfig,
        *asked: Any,
    ) -> tuple[bool, str | None]:
        """vLLM's question, whether these experts serve a layer, and the reason why not. A reason is logged once."""
        try:
            reason = mk.FusedMoEExperts.is_supported_config(cls, moe_config, *asked)[1] or cls.why_not(moe_config)
        except MoEError as error:
            reason = str(error)
        if reason:
            logger.info_once("tvm_moe does not serve these %s experts: %s", cls.dtype, reason)
        return reason is None, reason

    @classmethod
    def why_not(cls, config: FusedMoEConfig) -> str | None:
        """What vLLM's own questions, the ``_supports_`` below, do not cover; None where nothing forbids it."""
        if config.in_dtype not in cls.in_dtypes:
            names = " or ".join(str(d).removeprefix("torch.") for d in cls.in_dtypes)
            return f"the model runs in {config.in_dtype}, they need {names} (--dtype bfloat16)"
        activation(config)
        runtime.load(isa.choose(cls.dtype).kernel)
        return None

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in SERVED

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.enable_eplb  # it moves experts between ranks; packed ones cannot follow

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (M, K)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack; peak memory is the model and one layer."""
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        if not w13.numel():
            raise MoEError(
                "the weights of these experts are packed already and cannot be processed again; load them again"
            )
        use_bound_threads()
        packed = pack_experts(
            w13, w2, w13_scale=self.w1_scale, w2_scale=self.w2_scale, w13_bias=self.w1_bias, w2_bias=self.w2_bias,
            dtype=self.dtype, interleaved=interleaved(layer), **activation(self.moe_config, self.quant_config),
        )  # fmt: skip
        self.experts = Experts(packed)
        for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
            replace_parameter(layer, name, weight.new_empty(*weight.shape[:2], 0))
        if self.dtype == "int8" and not self.per_act_token_quant:
            logger.info_once("tvm_moe's INT8 is W8A8: activations are quantized per token, too")
        logger.info_once(
            "tvm_moe serves %s experts by its %s kernels, %d threads", self.dtype, packed.isa, threads.get_num_threads()
        )

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        if self.experts is None or w1.numel():
            raise MoEError(
                "the weights of these experts were not packed, or were replaced since: a quantization method that does not "
                f"prepare its experts after loading, or a weight update; {ENVIRONMENT}=0 leaves them to vLLM"
            )
        if expert_map is not None:
            topk_ids = local_ids(topk_ids, expert_map)
        if apply_router_weight_on_input:  # vLLM has multiplied the input
            topk_weights = torch.ones_like(topk_weights)
        # No out=: a call that allocates its result is remembered, and then passes fewer checks (api.known_call).
        output.copy_(self.experts(hidden_states, topk_weights, topk_ids))


class TVMMoEBF16Experts(TVMMoEExperts):
    """Unquantized experts, weights [E, 2I, H] and [E, H, I] in BF16."""

    dtype, in_dtypes = "bf16", (torch.bfloat16,)  # others would be rounded

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (None, None)

    @classmethod
    def why_not(cls, config: FusedMoEConfig) -> str | None:
        if setting() != "first":
            if is_zentorch_moe_config_supported(config):
                return f"vLLM has zentorch's ({ENVIRONMENT}=first prefers tvm_moe)"
            choice = isa.choose(cls.dtype)
            if choice.kernel.isa == "generic":
                rejected = "; ".join(f"{kernel.isa}: {reason}" for kernel, reason in choice.rejected)
                return f"only portable kernels run on this CPU ({rejected}), vLLM has better ones"
        return super().why_not(config)


class TVMMoEInt8Experts(TVMMoEExperts):
    """INT8 weights with a scale per output channel; activations quantized per token at run time."""

    dtype, in_dtypes = "int8", IO_DTYPES

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kInt8StaticChannelSym, kInt8DynamicTokenSym)


def activation(config: FusedMoEConfig, quant: FusedMoEQuantConfig | None = None) -> dict[str, Any]:
    """`pack_options` of a layer; parameters in its quantization config go before its own, as in vLLM."""
    own = (config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta)
    given = (None, None, None) if quant is None else (quant.gemm1_clamp_limit, quant.gemm1_alpha, quant.gemm1_beta)
    return pack_options(config.activation.value, *(b if a is None else a for a, b in zip(given, own, strict=True)))


def interleaved(layer: Any) -> bool:
    """Whether gate and up rows alternate: gpt-oss's do, but not where vLLM has put them together from two matrices."""
    method = type(layer.quant_method).__name__
    return layer.activation.value == "swigluoai" and method != "CompressedTensorsW8A8Int8MoEMethod"


def local_ids(ids: Tensor, expert_map: Tensor) -> Tensor:
    """Global ids as this rank's; experts of other ranks, and padding, are -1, which the kernel skips."""
    return torch.where(ids < 0, -1, expert_map[ids.clamp(min=0)])


def use_bound_threads() -> None:
    """As many threads as torch, where the calling thread is bound to fewer CPUs.

    vLLM binds each OpenMP thread of a worker to one core, the calling thread too, whose affinity then tells of one CPU.
    """
    count = min(torch.get_num_threads(), threads.quota())
    if threads.allowed() < count:
        threads.set_num_threads(count)
