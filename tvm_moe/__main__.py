"""``python -m tvm_moe``."""

from .cli import app

app(prog_name="tvm-moe")
