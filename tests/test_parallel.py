"""Layers over 2 and 4 processes give what one process gives; a rank that is gone is an error on the others, not a hang.

The processes of a number of ranks are started once and run all cases (`parallel_cases`), which are looked at one by one here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.helpers import make_case
from tests.parallel_cases import CASES
from tvm_moe import MoEError
from tvm_moe.bench import parallel as bench
from tvm_moe.models import LayerShape
from tvm_moe.parallel import EXCHANGES, ExpertParallelMoE, TensorParallelMoE

ROOT = Path(__file__).parent.parent
SECONDS = 240  # that all cases may take: a hang fails
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
GONE = [f"{name}-{other}{again}" for other in (1, 2) for name in (*EXCHANGES, "tensor") for again in ("", "-again")]


@cache
def results(what: str, world: int) -> list[dict[str, str | None]]:
    """Of each rank what became of every case; of one that ended without a word what it printed."""
    for dtype in ("int8", "bf16"):  # modules are built before processes ask for them all at the same time
        for isa in (None, "generic"):
            make_case(dtype=dtype, isa=isa).pack()
    with TemporaryDirectory() as folder:
        ranks = [start(what, rank, world, Path(folder)) for rank in range(world)]
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(0.1)
        for rank in ranks:
            rank.kill()
            rank.wait()
        return [told(Path(folder, str(i))) for i in range(world)]


def start(what: str, rank: int, world: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.parallel_ranks", what, str(rank), str(world), str(folder)]
    with Path(folder, f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=log, stderr=log)


def told(path: Path) -> dict[str, str | None]:
    written = path.with_suffix(".json")
    return json.loads(written.read_text()) if written.exists() else {"log": path.with_suffix(".log").read_text()}


def check(told: dict[str, str | None], name: str) -> None:
    assert name in told, f"did not run: {told.get('log', sorted(told))}"
    assert told[name] is None, told[name]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_as_one_process(world, name):
    for told in results("cases", world):
        check(told, name)


@pytest.mark.parametrize("name", [*GONE, "construction"])
def test_a_rank_that_is_gone(name):
    """Rank 1 was killed; rank 2 does not come before the timeout of its groups."""
    check(results("failures", 3)[0], name)


@pytest.mark.parametrize("kind", [ExpertParallelMoE, TensorParallelMoE])
def test_without_processes(kind):
    case = make_case()
    with pytest.raises(MoEError, match=r"call torch\.distributed\.init_process_group\('gloo', \.\.\.\) first"):
        kind.from_weights(case.w13, case.w2)


def test_benchmark():
    """All sides compute the same; what they take is not looked at."""
    shape = LayerShape("tiny", 64, 32, 6, 2)
    report = bench.run(bench.Options(shape, "int8", ranks=2, tokens=(1, 7), num_threads=1, rounds=2))
    sides = [bench.ALONE, *EXCHANGES, "tensor"]
    assert [(cell["tokens"], cell["side"]) for cell in report["cells"]] == [(n, side) for n in (1, 7) for side in sides]
    assert all(cell["ms"] > 0 and 0 <= cell["deviation"] < 0.01 for cell in report["cells"])
    assert "one process" in str([column.header for column in bench.table(report).columns])
