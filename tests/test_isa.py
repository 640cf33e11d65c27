"""Detection from (fake) registers, and the choice of a row for any architecture and any features."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_moe import UnsupportedISAError, explain, isa, kernels
from tvm_moe.isa import LADDER, X86_BITS, choose, x86_features
from tvm_moe.kernels import TABLE

ALL_X86 = frozenset(X86_BITS)
SSE, AVX, AVX512, AMX = 0x3, 0x7, 0xE7, 0x600E7
OSXSAVE = (1, 0, 2, 27)


def cpu(features=ALL_X86, *, leaves=0x20, subleaves=2, osxsave=True):
    """A CPUID that reports these features; a CPU that lacks a leaf answers with what it has last (here: all ones)."""
    bits = [X86_BITS[name][:4] for name in features] + [OSXSAVE] * osxsave

    def read(leaf, subleaf):
        if leaf == 0:
            return leaves, 0, 0, 0
        if leaf > leaves or (leaf == 7 and subleaf > subleaves):
            return (0xFFFFFFFF,) * 4
        registers = [sum(1 << bit for a, b, r, bit in set(bits) if (a, b, r) == (leaf, subleaf, i)) for i in range(4)]
        return (registers[0] | (subleaves if (leaf, subleaf) == (7, 0) else 0), *registers[1:])

    return read


def system(xcr0):
    def xgetbv(index):
        assert index == 0
        return xcr0

    return xgetbv


def no_xgetbv(index):
    raise AssertionError("XGETBV is an illegal instruction where OSXSAVE is not set")


def needing(state):
    return frozenset(name for name, bits in X86_BITS.items() if bits[4] & state)


@pytest.mark.parametrize("name", X86_BITS)
def test_each_feature_has_a_bit_of_its_own(name):
    assert x86_features(cpu([name]), system(AMX)) == {name}


def test_bits_are_those_of_the_manuals():
    """Intel SDM 2A, CPUID, tables 3-8: a few that this package's kernels stand or fall with."""
    assert X86_BITS["avx512_vnni"][:4] == (7, 0, 2, 11)
    assert X86_BITS["avx512_bf16"][:4] == (7, 1, 0, 5)
    assert X86_BITS["avx512f"][:4] == (7, 0, 1, 16)
    assert X86_BITS["avx2"][:4] == (7, 0, 1, 5)
    assert X86_BITS["fma"][:4] == (1, 0, 2, 12)


@pytest.mark.parametrize(
    ("xcr0", "lost"),
    [
        (AMX, frozenset()),
        (AVX512, needing(0x60000)),  # AMX in CPUID, tiles not enabled
        (AMX & ~0x20000, needing(0x60000)),  # tile configuration without tile data
        (AVX, needing(0xE0)),
        (AVX512 & ~0x80, needing(0xE0)),  # one of the three AVX-512 states missing
        (SSE, needing(0x4)),
        (0, needing(0x6)),
    ],
)
def test_the_system_must_have_enabled_the_registers(xcr0, lost):
    lost |= {name for name in ALL_X86 if X86_BITS[name][4] & ~xcr0}
    got = x86_features(cpu(), system(xcr0))
    assert got == ALL_X86 - lost
    assert {"bmi", "bmi2"} <= got


def test_without_osxsave_nothing_wide_is_usable():
    assert x86_features(cpu(osxsave=False), no_xgetbv) == {"bmi", "bmi2"}


def test_leaves_that_do_not_exist_are_not_read():
    assert x86_features(cpu(leaves=1), system(AMX)) == {"fma", "f16c"}
    of_subleaf_1 = {name for name, bits in X86_BITS.items() if bits[:2] == (7, 1)}
    assert x86_features(cpu(subleaves=0), system(AMX)) == ALL_X86 - of_subleaf_1


def test_this_cpu_as_the_kernel_sees_it():
    """Linux lists what it has enabled under other names; it may hide more than XCR0 does, never less."""
    if isa.machine() != "x86_64":
        pytest.skip("reads the x86 flags of /proc/cpuinfo")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    names = {"bmi": "bmi1", "avxvnni": "avx_vnni", "avxvnniint8": "avx_vnni_int8"}
    assert {names.get(f, f) for f in isa.features() & {"avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16"}} <= flags


@pytest.fixture
def amx_cpu(monkeypatch):
    """A CPU with everything, under a system that answers a request for tiles as the test says."""

    def cpu(answer):
        monkeypatch.delenv(isa.ENVIRONMENT, raising=False)
        monkeypatch.setattr(isa, "x86_features", lambda *_: ALL_X86)
        monkeypatch.setattr(isa, "request_tiles", lambda: answer)
        clear()

    def clear():
        for cached in (isa.features, isa.detected):
            cached.cache_clear()

    if isa.machine() != "x86_64":
        pytest.skip("x86-64 Linux asks for permission")
    yield cpu
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize("dtype", kernels.dtypes_of("amx"))
def test_a_refused_permission_leaves_the_level_below(dtype, amx_cpu):
    amx_cpu("")
    assert choose(dtype).kernel.isa == "amx"
    reason = "the operating system refused permission to use AMX tiles: errno 22 (Invalid argument)"
    amx_cpu(reason)
    assert isa.features() == ALL_X86 - isa.AMX
    choice = choose(dtype)
    assert choice.kernel.isa == "avx512_vnni"
    assert [why for kernel, why in choice.rejected if kernel.isa == "amx"] == [reason]
    assert f"rejected amx: {reason}" in explain()
    assert isa.executable(kernels.find("amx", dtype)) == (False, reason)
    with pytest.raises(
        UnsupportedISAError, match=r"which this CPU or its operating system lacks \(the operating system ref"
    ):
        choose(dtype, "amx")


def test_a_cpu_without_tiles_gets_no_permission():
    if isa.machine() != "x86_64" or "amx_tile" in x86_features(isa.cpuid, isa.cpu_library().moe_xgetbv):
        pytest.skip("needs an x86-64 CPU without AMX")
    assert re.fullmatch(
        r"the operating system refused permission to use AMX tiles: errno \d+ \(.+\)", isa.request_tiles()
    )


FULL = {"x86_64": ALL_X86, "aarch64": frozenset(isa.AARCH64_BITS)}


@pytest.mark.parametrize(("arch", "dtype"), [*itertools.product(LADDER, kernels.DTYPES)])
def test_the_highest_level_that_runs_is_chosen_and_the_others_have_reasons(arch, dtype, monkeypatch):
    monkeypatch.delenv(isa.ENVIRONMENT, raising=False)
    found = kernels.rows_for(arch, dtype)
    for kernel in found:
        choice = choose(dtype, arch=arch, available=kernel.features)
        assert choice.kernel.features <= kernel.features
        assert found.index(choice.kernel) >= found.index(kernel)
        assert {k for k, _ in choice.rejected} == set(found) - {choice.kernel}
        for other, reason in choice.rejected:
            missing = other.features - kernel.features
            assert reason == (
                f"this CPU lacks {', '.join(sorted(missing))}" if missing else f"lower level than {choice.kernel.isa}"
            )
    assert choose(dtype, arch=arch, available=FULL[arch]).kernel is found[-1]
    assert choose(dtype, arch=arch, available=frozenset()).kernel is found[0]


HASWELL = {"avx2", "fma", "f16c", "bmi", "bmi2"}
SKYLAKE_X = HASWELL | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
COOPER_LAKE = SKYLAKE_X | {"avx512_vnni", "avx512_bf16"}
CPUS = {  # features; the levels of INT8 and BF16
    "Nehalem": (set(), "generic", "generic"),
    "Haswell": (HASWELL, "avx2", "avx2"),
    "Zen 3": (HASWELL, "avx2", "avx2"),
    "Knights Landing": (HASWELL | {"avx512f", "avx512cd"}, "avx2", "avx2"),
    "Alder Lake": (HASWELL | {"avxvnni"}, "avxvnni", "avx2"),
    "Sierra Forest": (HASWELL | {"avxvnni", "avxvnniint8"}, "avxvnniint8", "avx2"),
    "Skylake-X": (SKYLAKE_X, "avx512", "avx512"),
    "Cascade Lake": (SKYLAKE_X | {"avx512_vnni"}, "avx512_vnni", "avx512"),
    "Ice Lake": (SKYLAKE_X | {"avx512_vnni"}, "avx512_vnni", "avx512"),
    "Cooper Lake": (COOPER_LAKE, "avx512_vnni", "avx512_vnni"),
    "Zen 4": (COOPER_LAKE, "avx512_vnni", "avx512_vnni"),
    "Zen 5": (COOPER_LAKE | {"avxvnni"}, "avx512_vnni", "avx512_vnni"),
}


@pytest.mark.parametrize("name", CPUS)
def test_each_dtype_takes_its_own_level(name, monkeypatch):
    """VNNI without BF16 instructions takes BF16 from AVX-512; AVX-VNNI takes it from AVX2."""
    monkeypatch.delenv(isa.ENVIRONMENT, raising=False)
    available, *levels = CPUS[name]
    assert [choose(d, arch="x86_64", available=frozenset(available)).kernel.isa for d in kernels.DTYPES] == levels


def test_the_environment_caps_the_choice_but_not_a_demand(monkeypatch):
    monkeypatch.setenv(isa.ENVIRONMENT, "generic")
    choice = choose("int8", arch="x86_64", available=ALL_X86)
    assert choice.kernel.isa == "generic"
    assert ("avx512_vnni", "above the cap TVM_MOE_ISA=generic") in [(k.isa, why) for k, why in choice.rejected]
    assert choose("int8", "avx512_vnni", arch="x86_64", available=ALL_X86).kernel.isa == "avx512_vnni"
    monkeypatch.setenv(isa.ENVIRONMENT, LADDER["x86_64"][-1])
    assert choose("int8", arch="x86_64", available=frozenset()).kernel.isa == "generic"
    monkeypatch.setenv(isa.ENVIRONMENT, "")
    assert choose("int8", arch="x86_64", available=ALL_X86).kernel is kernels.rows_for("x86_64", "int8")[-1]


def test_the_cap_reaches_packing(monkeypatch):
    from tests.helpers import make_case

    monkeypatch.setenv(isa.ENVIRONMENT, "generic")
    assert make_case().pack().isa == "generic"


@pytest.mark.parametrize(("arch", "level"), [("x86_64", "i8mm_bf16"), ("aarch64", "avx2"), ("x86_64", "AVX2")])
def test_a_cap_that_is_no_level(arch, level, monkeypatch):
    monkeypatch.setenv(isa.ENVIRONMENT, level)
    with pytest.raises(UnsupportedISAError, match=rf"TVM_MOE_ISA='{level}' is no level of {arch}; expected .*generic"):
        choose("bf16", arch=arch, available=frozenset())


@pytest.mark.parametrize("kernel", [k for k in TABLE if k.features], ids=lambda k: k.key)
def test_a_demand_names_every_missing_feature(kernel):
    arch = kernel.arches[0]
    assert choose(kernel.dtype, kernel.isa, arch=arch, available=kernel.features).kernel is kernel
    for lost in [*({f} for f in kernel.features), kernel.features]:
        with pytest.raises(UnsupportedISAError, match=rf"features? {', '.join(sorted(lost))}, which this CPU or its"):
            choose(kernel.dtype, kernel.isa, arch=arch, available=kernel.features - lost)


def test_demands_that_no_cpu_can_meet():
    with pytest.raises(UnsupportedISAError, match="isa='dotprod' is no level of x86_64"):
        choose("int8", "dotprod", arch="x86_64", available=ALL_X86)
    for arch, level in ((a, level) for a in LADDER for level in LADDER[a]):
        for dtype in kernels.DTYPES:
            if not any(k.isa == level for k in kernels.rows_for(arch, dtype)):
                with pytest.raises(UnsupportedISAError, match=rf"isa='{level}' has no {dtype} kernel in this version"):
                    choose(dtype, level, arch=arch, available=FULL[arch])


@pytest.mark.parametrize(
    ("name", "arch"), [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64")]
)
def test_architectures(name, arch, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: name)
    assert isa.machine() == arch


def test_a_foreign_architecture(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UnsupportedISAError, match="architecture 'riscv64' is not supported; expected one of"):
        isa.machine()


def test_rows_of_another_architecture_are_not_executable(monkeypatch):
    monkeypatch.setattr(isa, "machine", lambda: "aarch64")
    monkeypatch.setattr(isa, "features", lambda: ALL_X86 | FULL["aarch64"])
    for kernel in TABLE:
        runs, reason = isa.executable(kernel)
        assert runs == ("aarch64" in kernel.arches)
        assert runs or "this machine is aarch64" in reason


def test_aarch64_reads_the_auxiliary_vector():
    """Off AArch64 the bits mean other things, but the call works and answers with known names."""
    assert isa._aarch64_features() <= set(isa.AARCH64_BITS)


def test_detection_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None\nfrom tvm_moe import isa; print(sorted(isa.features()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert done.stdout == f"{sorted(isa.features())}\n", done.stderr
