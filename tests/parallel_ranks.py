"""A process of test_parallel: `python -m tests.parallel_ranks {cases,failures} RANK WORLD FOLDER`.

It writes what became of every case, null or a traceback, into FOLDER/RANK.json.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tvm_moe
from tests.helpers import make_case
from tests.parallel_cases import CASES
from tests.parallel_tools import call, layer, raises
from tvm_moe.parallel import EXCHANGES, ExpertParallelMoE, TensorParallelMoE

Done = dict[str, str | None]
SECONDS = 60  # that a rank waits for another


def attempt(function: Callable[[], object]) -> str | None:
    try:
        function()
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return None


def cases() -> Done:
    """All of them, up to one that fails before its yield: this rank's end is then an error on the others, not a wait."""
    done: Done = {}
    for name, case in CASES.items():
        steps = case()
        done[name] = attempt(partial(next, steps))
        if done[name] is not None:
            break
        done[name] = attempt(partial(list, steps))
    return done


def failures(folder: Path) -> Done:
    """Rank 1 dies, rank 2 does not come. Rank 0 meets both in every exchange, each in a group of its own."""
    rank, case, modules = dist.get_rank(), make_case(E=7, weights="int8"), {}
    makers = {name: partial(layer, ExpertParallelMoE, exchange=name) for name in EXCHANGES}
    makers |= {"tensor": partial(layer, TensorParallelMoE)}
    for other, seconds in ((1, SECONDS), (2, 2)):
        for name, make in makers.items():
            group = dist.new_group([0, other], timeout=datetime.timedelta(seconds=seconds))
            if rank in (0, other):
                modules[f"{name}-{other}"] = module = make(case, group=group)
                call(module, case)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while rank == 2 and not (folder / "0.json").exists():
        time.sleep(0.1)
    done: Done = {}
    for name, module in modules.items() if rank == 0 else ():
        done[name] = attempt(partial(raises, "failed on rank 0 of 2 (", call, module, case))
        done[f"{name}-again"] = attempt(partial(raises, "rank may have died, or not have come", call, module, case))
    if rank == 0:
        gone = partial(makers["tensor"], case, group=modules["tensor-1"].group.group)
        done["construction"] = attempt(partial(raises, "the comparison of ranks failed", gone))
    return done


def main(what: str, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    tvm_moe.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
    done = cases() if what == "cases" else failures(folder)
    written = folder / f"{rank}.tmp"
    written.write_text(json.dumps(done))
    written.rename(folder / f"{rank}.json")
    os._exit(0)  # an orderly end would wait for the ranks that are gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
