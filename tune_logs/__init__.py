"""Tuning records, one folder a CPU family: data for `tvm_moe` (none yet; every kernel runs with its schedule's defaults)."""
