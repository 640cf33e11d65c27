"""`fma` on 512 bits: AVX-512 without instructions for bf16."""

from __future__ import annotations

from functools import partial

from . import fma

LANES, HELD = 16, fma.HELD
tensor_intrin = partial(fma.tensor_intrin, LANES)
llvm_ir = partial(fma.llvm_ir, lanes=LANES)
