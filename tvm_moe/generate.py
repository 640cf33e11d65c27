"""Text from a transformers model whose experts run here: tokens per second, memory, and a baseline beside it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import isa as levels
from .errors import MoEError

OURS = "tvm_moe"


@dataclass
class Side:
    """One model: what it has generated, and how long each run took."""

    name: str
    model: Any
    tokens: list[int] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)  # seconds until the first token
    decode: list[float] = field(default_factory=list)  # seconds a token, of those after it
    experts: list[float] = field(default_factory=list)  # share of all that time spent in the experts

    def measure(self, prompt: Tensor, new_tokens: int) -> None:
        """Greedy; the experts' share is taken by hooks, which cost some microseconds a layer."""
        clock = Clock()
        with torch.inference_mode(), expert_seconds(self.model) as spent:
            start = time.perf_counter()
            found = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=clock, do_sample=False,
                max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            )  # fmt: skip
        first, *rest = clock.times[1:]  # the prompt itself comes before them
        self.tokens = found[0, prompt.shape[1] :].tolist()
        self.prefill.append(first - start)
        if rest:
            self.decode.append((rest[-1] - first) / len(rest))
        self.experts.append(sum(spent) / (clock.times[-1] - start))


class Clock:
    """A streamer for `generate` that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@contextmanager
def expert_seconds(model: Any) -> Iterator[list[float]]:
    """Seconds of each call of a module of experts while the context lasts."""
    spent: list[float] = []
    begun: list[float] = []
    handles = []
    for module in expert_modules(model):
        handles.append(module.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter())))
        handles.append(module.register_forward_hook(lambda *_: spent.append(time.perf_counter() - begun.pop())))
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def expert_modules(model: Any) -> list[Any]:
    """Modules of transformers that hold all experts of a layer."""
    return [m for m in model.modules() if hasattr(m, "num_experts") and type(m).__name__.endswith("Experts")]


@dataclass(frozen=True)
class Result:
    """A side as reported. Speeds are medians over rounds, in tokens per second."""

    name: str
    text: str
    tokens: list[int]
    prefill: float
    decode: float | None
    experts: float
    bits_per_byte: float | None


def generate(
    path: str, dtype: str, prompt: str, *, new_tokens: int = 64, compare: str | None = None, rounds: int = 3,
    held_out: Path | None = None, isa: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Load, prepare, generate. ``compare``: an experts implementation of transformers to run beside, on a model of its own.

    All sides take turns, so that they meet the same load. ``held_out``: a text whose bits per byte are measured, too.
    """
    check_sizes(new_tokens, rounds)
    if isa is not None:
        levels.choose(dtype, isa)  # what cannot run is said before anything is loaded
    data = None if held_out is None else read(held_out)
    tokenizer, model, report = load(path, dtype, isa)
    ids = encode(tokenizer, prompt)
    check_length(model, ids.shape[1] + new_tokens)
    sides = [Side(OURS, model)]
    if compare is not None:
        sides.append(Side(compare, baseline(path, compare)))
    for side in sides:
        side.measure(ids, min(new_tokens, 2))  # nothing is loaded or built in what counts
        side.prefill, side.decode, side.experts = [], [], []
    for i in range(rounds):
        for side in sides[i % len(sides) :] + sides[: i % len(sides)]:
            side.measure(ids, new_tokens)
    return {
        "model": path,
        "dtype": dtype,
        "prompt_tokens": ids.shape[1],
        "new_tokens": new_tokens,
        "packed": str(report),
        "sides": [asdict(result(side, tokenizer, ids.shape[1], data)) for side in sides],
    }


def check_sizes(new_tokens: int, rounds: int) -> None:
    for name, value in (("new_tokens", new_tokens), ("rounds", rounds)):
        if value < 1:
            raise MoEError(f"{name} must be at least 1, got {value}")


def check_length(model: Any, tokens: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise MoEError(f"prompt and new tokens are {tokens} together, this model takes at most {most}; ask for fewer")


def read(held_out: Path) -> bytes:
    try:
        return held_out.read_bytes()
    except OSError as error:
        raise MoEError(f"--held-out {held_out}: cannot be read ({error.strerror}); give a file of text") from None


def result(side: Side, tokenizer: Any, prompt_tokens: int, data: bytes | None) -> Result:
    from . import small_model

    bits = None
    if data is not None:
        tokens = encode(tokenizer, data.decode(errors="replace"))[0]
        bits = small_model.bits_per_byte(side.model, tokens, len(data))
    decode = statistics.median(side.decode) if side.decode else None
    return Result(
        side.name, tokenizer.decode(side.tokens), side.tokens, prompt_tokens / statistics.median(side.prefill),
        1 / decode if decode else None, statistics.median(side.experts), bits,
    )  # fmt: skip


def encode(tokenizer: Any, text: str) -> Tensor:
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    if not ids.numel():
        raise MoEError("the prompt has no tokens; give at least one character")
    return ids


def load(path: str, dtype: str, isa: str | None) -> tuple[Any, Any, Any]:
    """Tokenizer, prepared model and the report of what was packed."""
    transformers = imported()
    from .integrations.transformers import load_int8, prepare_

    try:
        config = transformers.AutoConfig.from_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise MoEError(f"{path}: no model that transformers can open ({first_line(error)})") from error
    if not tokenizer("a", add_special_tokens=False).input_ids:
        raise MoEError(f"{path}: has no tokenizer, or an empty one; generate needs the model's own beside its weights")
    if getattr(config, "quantization_config", None) is not None:
        if dtype != "int8":
            raise MoEError(f"{path} is stored in INT8 and runs as it is: --dtype int8")
        model = load_int8(path, isa=isa)
        return tokenizer, model, "as stored"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    return tokenizer, model, prepare_(model, None if dtype == "bf16" else dtype, isa=isa)


def baseline(path: str, implementation: str) -> Any:
    try:
        model = imported().AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, experts_implementation=implementation
        )
    except (ValueError, KeyError) as error:
        raise MoEError(f"--compare {implementation}: {first_line(error)}") from error
    return model.eval()


def imported() -> Any:
    try:
        import transformers
    except ImportError:
        raise MoEError("tvm-moe generate needs transformers: pip install 'tvm_moe[hf]'") from None
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    return transformers


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
