"""How many threads a call uses: what is asked for, what the cgroup and the affinity allow, and which team runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tvm_moe
from tvm_moe import threads

ROOT = Path(__file__).parent.parent
V2 = "0::/user.slice/app\n"
V1 = "12:cpuset:/jobs/7\n5:cpu,cpuacct:/jobs/7\n3:memory:/jobs/7\n"


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Write files of a fake /sys/fs/cgroup, and the listing of this process in it; gives the resulting quota."""

    def quota(listing, files):
        for name, text in files.items():
            file = tmp_path / "sys" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (tmp_path / "cgroup").write_text(listing)
        monkeypatch.setattr(threads, "CGROUP_ROOT", tmp_path / "sys")
        monkeypatch.setattr(threads, "CGROUP_LISTING", tmp_path / "cgroup")
        return threads.quota.__wrapped__()

    return quota


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, sys.maxsize),
        ({"user.slice/app/cpu.max": "max 100000\n"}, sys.maxsize),
        ({"user.slice/app/cpu.max": "200000 100000\n"}, 2),
        ({"user.slice/app/cpu.max": "150000 100000\n"}, 2),  # rounded up: one and a half CPUs keep two threads busy
        ({"user.slice/app/cpu.max": "20000 100000\n"}, 1),
        ({"user.slice/cpu.max": "300000 100000", "user.slice/app/cpu.max": "max 100000"}, 3),
        ({"user.slice/cpu.max": "300000 100000", "user.slice/app/cpu.max": "500000 100000"}, 3),
        ({"cpu.max": "100000 100000", "user.slice/app/cpu.max": "500000 100000"}, 1),
        ({"user.slice/app/cpu.max": "nonsense"}, sys.maxsize),
        ({"user.slice/app/cpu.max": ""}, sys.maxsize),
        ({"user.slice/app/cpu.max": "100000 0"}, sys.maxsize),
        ({"other/cpu.max": "100000 100000"}, sys.maxsize),
    ],
)
def test_quotas_of_cgroup_2(cgroup, files, expected):
    assert cgroup(V2, files) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu/jobs/7/cpu.cfs_quota_us": "-1\n", "cpu/jobs/7/cpu.cfs_period_us": "100000\n"}, sys.maxsize),
        ({"cpu/jobs/7/cpu.cfs_quota_us": "250000\n", "cpu/jobs/7/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/jobs/cpu.cfs_quota_us": "100000\n", "cpu/jobs/cpu.cfs_period_us": "50000\n"}, 2),
        (
            {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            1,
        ),  # a container sees its own as root
        ({"memory/jobs/7/cpu.cfs_quota_us": "100000\n", "memory/jobs/7/cpu.cfs_period_us": "100000\n"}, sys.maxsize),
    ],
)
def test_quotas_of_cgroup_1(cgroup, files, expected):
    assert cgroup(V1, files) == expected


@pytest.mark.parametrize("listing", ["", "garbage\n", "0::/no/such/group\n", "1:name=systemd:/\n"])
def test_listings_without_a_quota(cgroup, listing):
    assert cgroup(listing, {"user.slice/app/cpu.max": "100000 100000"}) == sys.maxsize


@pytest.fixture
def ask_always(monkeypatch):
    """Affinity is asked for at every look."""
    monkeypatch.setattr(threads, "AFFINITY_SECONDS", 0)
    monkeypatch.setattr(threads, "_allowed_until", 0)


def test_affinity_is_asked_for_again_after_a_while(monkeypatch, set_num_threads):
    set_num_threads(None)
    monkeypatch.setattr(threads, "quota", lambda: sys.maxsize)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    monkeypatch.setattr(threads, "_allowed_until", 0)
    now = [100.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    seen = []
    for cpus, later in ((3, 0), (5, threads.AFFINITY_SECONDS / 2), (5, threads.AFFINITY_SECONDS)):
        now[0] += later
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: set(range(cpus)))
        seen.append(tvm_moe.get_num_threads())
    assert seen == [3, 3, 5]


def test_the_smallest_of_all_limits_counts(monkeypatch, set_num_threads, ask_always):
    set_num_threads(None)
    torch_threads = torch.get_num_threads()
    cpus = len(os.sched_getaffinity(0))
    assert tvm_moe.get_num_threads() == min(torch_threads, cpus, threads.quota())
    monkeypatch.setattr(threads, "quota", lambda: 1)
    assert tvm_moe.get_num_threads() == 1
    monkeypatch.setattr(threads, "quota", lambda: sys.maxsize)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert tvm_moe.get_num_threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(100)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    assert tvm_moe.get_num_threads() == 17


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("OMP_PROC_BIND", "true", False),
        ("OMP_PROC_BIND", "close,spread", False),
        ("GOMP_CPU_AFFINITY", "0 1", False),
        ("OMP_PROC_BIND", "FALSE", True),
    ],
)
def test_the_mask_of_a_pinned_thread_is_not_that_of_the_team(
    monkeypatch, set_num_threads, ask_always, name, value, counts
):
    """OpenMP pins the calling thread, too, to one core."""
    set_num_threads(None)
    for other in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "quota", lambda: sys.maxsize)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    assert tvm_moe.get_num_threads() == (1 if counts else 17)


def test_an_explicit_number_is_taken_as_it_is(monkeypatch, set_num_threads, ask_always):
    monkeypatch.setattr(threads, "quota", lambda: 1)
    set_num_threads(5)
    assert tvm_moe.get_num_threads() == 5
    set_num_threads(None)
    assert tvm_moe.get_num_threads() == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", 3),
        ("4,2", 4),
        ("", sys.maxsize),
        ("0", sys.maxsize),
        ("many", sys.maxsize),
        ("-2", sys.maxsize),
        (None, sys.maxsize),
    ],
)
def test_without_torch_omp_num_threads_counts(value, expected, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads.requested() == expected


CHILD = """
import os, sys, warnings
{before}
from tvm_moe import SlowPathWarning, get_num_threads, threads
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    counts = [get_num_threads() for _ in range(3)]
print(counts, [(w.category is SlowPathWarning, str(w.message)) for w in said], threads.said())
"""


def child(before):
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", CHILD.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_an_openmp_runtime_calls_are_serial_and_say_so_once():
    block = """
import ctypes
original = ctypes.CDLL
def without(name, *args, **kwargs):
    if name is None or "gomp" in str(name):
        raise OSError("no such library")
    return original(name, *args, **kwargs)
ctypes.CDLL = without
"""
    out = child(block)
    message = "no OpenMP runtime (libgomp) in this process: running serially; import torch first or install libgomp1"
    assert out == f"[1, 1, 1] [(True, 'tvm_moe: {message}')] ['{message}']\n"


def test_the_team_is_the_one_torch_started():
    """Its libgomp is inside of its own folder; a second one would fight it for the cores."""
    done = child("import torch; torch.ones(9) @ torch.ones(9)")
    assert done.startswith("[2, 2, 2]") or len(os.sched_getaffinity(0)) < 2
    code = """
import torch
from tvm_moe import threads
address = threads.team()
line = next(l for l in open("/proc/self/maps") if int(l.split("-")[0], 16) <= address < int(l.split()[0].split("-")[1], 16))
print(line.split()[-1], len({l.split()[-1] for l in open("/proc/self/maps") if "gomp" in l or "iomp" in l}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    library, count = done.stdout.split()
    assert str(Path(torch.__file__).parent.parent) in library
    assert count == "1"


INTEL = Path(sys.prefix, "lib", "libiomp5.so")  # where pip puts it


@pytest.mark.skipif(not INTEL.exists(), reason=f"no {INTEL}: pip install intel-openmp")
def test_a_preloaded_intel_runtime_is_the_team_of_both():
    """Torch has started two threads; a call on two adds none, and its result is that of torch's own libgomp."""
    code = """
import os, sys, torch, tvm_moe
from tests.helpers import make_case
from tvm_moe.bench.beside import openmp
torch.set_num_threads(2)
tvm_moe.set_num_threads(2)
torch.ones(500, 500) @ torch.ones(500, 500)
case = make_case(T=64, E=6, H=200, I=300, k=3, dtype="int8")
before = len(os.listdir("/proc/self/task"))
result = case.run(case.pack())
print(openmp(), len(os.listdir("/proc/self/task")) - before, result.view(torch.int16).sum(dtype=torch.int64).item())
"""
    command, environment = [sys.executable, "-W", "ignore", "-c", code], os.environ | {"LD_PRELOAD": str(INTEL)}
    intel, torchs = (
        subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
        for env in (environment, None)
    )
    assert intel.stdout.startswith("libiomp5.so 0 "), intel.stderr
    assert torchs.stdout.startswith("libgomp"), torchs.stderr
    assert intel.stdout.split()[2] == torchs.stdout.split()[2]


def test_a_fork_is_noticed():
    code = """
import os
from tvm_moe import threads
threads.set_num_threads(4)
child = os.fork()
if child == 0:
    os._exit(10 + threads.get_num_threads())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), threads.get_num_threads())
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout == "11 4\n"


@pytest.mark.parametrize("limit", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_THREAD_LIMIT": "2"}, {"OMP_DYNAMIC": "true"}, {}])
def test_a_team_smaller_or_larger_than_asked_for_does_all_work(limit):
    """An OpenMP runtime may give fewer threads than a region wants; many threads share few cores."""
    code = """
import torch, tvm_moe
from tests.helpers import make_case
for dtype in ("int8", "bf16"):
    case = make_case(T=64, E=6, H=200, I=300, k=3, dtype=dtype)
    packed, results = case.pack(), []
    for n in (1, 2, 5, 64):
        tvm_moe.set_num_threads(n)
        results.append(case.run(packed))
    assert all(torch.equal(result, results[0]) for result in results)
print("equal")
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | limit, timeout=120)
    assert done.stdout == "equal\n", done.stderr
