"""`pmaddwd` on 512 bits: AVX-512 without VNNI."""

from __future__ import annotations

from functools import partial

from . import pmaddwd

LANES, REGISTERS = 32, pmaddwd.REGISTERS
tensor_intrin = partial(pmaddwd.tensor_intrin, LANES)
llvm_ir = partial(pmaddwd.llvm_ir, lanes=LANES)
