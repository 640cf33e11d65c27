"""A small Qwen3-MoE model of bytes, trained here in minutes on text that comes with Python: text that means something.

``scripts/train_small_model FOLDER`` writes it; ``tvm-moe generate FOLDER`` then shows speed, and what INT8 costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import MoEError

SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "intermediate_size": 256, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "output_router_logits": True, "router_aux_loss_coef": 0.01,
}  # fmt: skip
SEQUENCE, BATCH, STEPS, RATE = 256, 8, 400, 3e-3
HELD_OUT = 32 << 10  # bytes at the end of the text that training never sees


def text() -> bytes:
    """The help topics of Python's `pydoc`: about 0.7 MB of English about Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise MoEError("this Python has no pydoc_data, the text to train on; install Python's full library") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def encode(data: bytes) -> Tensor:
    """Token ids int64 as ByT5's tokenizer gives them: three special ids, then the bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long() + 3


def make(seed: int = 0, **sizes: Any) -> Any:
    """An untrained model in f32."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        **(SIZES | sizes), vocab_size=384, bos_token_id=None, eos_token_id=1, pad_token_id=0
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def train(
    model: Any,
    data: bytes,
    steps: int = STEPS,
    batch: int = BATCH,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """AdamW with a tenth of warmup and a cosine down to zero; ``progress(step, bits per byte)`` of the batch after each."""
    tokens, generator = encode(data), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, 10 * (s + 1) / steps) * (1 + math.cos(math.pi * s / steps)) / 2
    )
    model.train()
    for step in range(steps):
        at = torch.randint(len(tokens) - SEQUENCE, (batch, 1), generator=generator)
        rows = tokens[at + torch.arange(SEQUENCE)]
        found = model(input_ids=rows, labels=rows)
        optimizer.zero_grad()
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if progress is not None:
            progress(
                step, (found.loss.item() - model.config.router_aux_loss_coef * found.aux_loss.item()) / math.log(2)
            )
    model.eval()


@torch.inference_mode()
def bits_per_byte(model: Any, tokens: Tensor, characters: int | None = None, window: int = 512) -> float:
    """Cross-entropy in bits of ``tokens`` [N] but the first of each window, a byte of the text they stand for each.

    ``characters``: bytes of the text, where a token is not a byte.
    """
    bits, count = 0.0, 0
    for row in tokens.split(window):
        if len(row) < 2:
            continue
        logits = model(input_ids=row[None]).logits[0, :-1].float()
        bits += torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").item() / math.log(2)
        count += len(row) - 1
    if not count:
        raise MoEError("bits per byte need a text of at least two tokens, got none; give a longer one")
    return bits / count * (len(tokens) / characters if characters else 1.0)


def write(folder: Path, steps: int = STEPS, progress: Callable[[int, float], None] | None = None) -> float:
    """Train and save in BF16, with a tokenizer and ``held-out.txt``; bits per byte on that text, in f32."""
    import transformers

    if folder.exists():
        raise MoEError(f"{folder} exists; remove it or give another folder")
    data, model = text(), make()
    train(model, data[:-HELD_OUT], steps, progress=progress)
    found = bits_per_byte(model, encode(data[-HELD_OUT:]))
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.ByT5Tokenizer().save_pretrained(folder)
    (folder / "held-out.txt").write_bytes(data[-HELD_OUT:])
    return found


def main(folder: Path, steps: int = STEPS) -> None:
    """Train the small model into FOLDER, in about five minutes on two cores."""
    import typer

    start = time.monotonic()

    def progress(step: int, bits: float) -> None:
        if step % 20 == 0 or step == steps - 1:
            typer.echo(f"step {step:4d}: {bits:.2f} bits per byte, {time.monotonic() - start:.0f} s", err=True)

    typer.echo(f"{folder}: {write(folder, steps, progress):.3f} bits per byte on held-out text, in f32")


if __name__ == "__main__":
    import typer

    typer.run(main)
