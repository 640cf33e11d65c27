"""vLLM's whole engine on a checkpoint: ``python -m tests.peers.vllm_engine FOLDER`` prints the tokens it generates."""

from __future__ import annotations

import json
import sys


def main(folder: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64,
        kv_cache_memory_bytes=16 << 20, gpu_memory_utilization=0.1,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    results = engine.generate([{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}], sampling)
    print(json.dumps([list(r.outputs[0].token_ids) for r in results]))


if __name__ == "__main__":  # workers are spawned
    main(sys.argv[1])
