"""Run by `test_x86` on an emulated CPU: which levels it takes, and whole layers against the reference."""

from __future__ import annotations

import json
import sys

import tvm_moe
from tests.helpers import ACTIVATION_OPTIONS, assert_matches_reference, make_case
from tvm_moe import isa

if __name__ == "__main__":
    tvm_moe.set_num_threads(2)
    sizes = [{"T": 1}, {"T": 9, "H": 70, "I": 33, "bias": True}, {"T": 40, "H": 130, "I": 96, "k": 3}]
    for dtype in ("int8", "bf16"):
        for i, options in enumerate(ACTIVATION_OPTIONS):
            case = make_case(**sizes[i % len(sizes)], **options, dtype=dtype)
            assert_matches_reference(case.run(case.pack()), case)
    json.dump({dtype: isa.choose(dtype).kernel.isa for dtype in ("int8", "bf16")}, sys.stdout)
