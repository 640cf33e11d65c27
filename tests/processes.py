"""Processes of their own: what a module says when it is run by this Python, or by this Python on an emulated CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def said(*module: object, under: tuple[str, ...] = ()) -> str:
    """Standard output of ``python -m module arguments...`` at the checkout, which must end well; ``under``: what runs it."""
    done = subprocess.run(
        [*under, sys.executable, "-W", "ignore", "-m", *map(str, module)],
        cwd=ROOT, env=os.environ | {"TVM_MOE_ISA": "", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
