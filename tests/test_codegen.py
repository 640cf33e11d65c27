"""The code of every row for every architecture, on any host: the intended instructions, and none that a CPU could lack."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from itertools import pairwise

import pytest

from tvm_moe import isa
from tvm_moe.compiler import build
from tvm_moe.compiler.compute import column_block
from tvm_moe.kernels import TABLE
from tvm_moe.schedules import style

INSTRUCTION = {
    "vnni": "vpdpbusd",
    "avx512bf16": "vdpbf16ps",
    "sdot": "sdot",
    "pmaddwd": "vpmaddwd",
    "pmaddwd512": "vpmaddwd",
    "fma": r"vfmadd\d+ps",
    "fma512": r"vfmadd\d+ps",
    "avxvnni": "vpdpbusd",
    "avxvnniint8": "vpdpbssd",
    "smmla": "smmla",
    "bfmmla": "bfmmla",
    "tdpbusd": "tdpbusd",
    "tdpbf16ps": "tdpbf16ps",
}  # of the intrinsics in compiler/intrin
# Instructions that a register of sums takes in a K group.
PER_SUM = {"pmaddwd": 1, "pmaddwd512": 1, "fma": 2, "fma512": 2}
# What tells a K loop from others that hold the instruction.
K_LOOP = {"fma": "vpblendw", "fma512": "vpandq"}
ALL = [pytest.param(k, arch, id=f"{arch}-{k.key}") for k in TABLE for arch in k.arches]
INTRINSIC = [pytest.param(k, arch, id=f"{arch}-{k.key}") for k in TABLE for arch in k.arches if k.intrinsic]
TILES = [p for p in INTRINSIC if p.values[0].style == "TileProduct"]
X86_INTRINSIC = [p for p in INTRINSIC if p.values[1] == "x86_64" and p not in TILES]
ARM_INTRINSIC = [p for p in INTRINSIC if p.values[1] == "aarch64"]
X86_BASELINE = [p for p in ALL if p.values[1] == "x86_64" and p.values[0].mcpu("x86_64") == ""]
ARM_BASELINE = [p for p in ALL if p.values[1] == "aarch64" and p.values[0].mcpu("aarch64") == ""]


@cache
def assembly(kernel, arch):
    """The lines of a module's assembly that are labels or instructions."""
    lines = build.compile_kernel(kernel, arch).mod.inspect_source("asm").splitlines()
    code = (re.split(r"\s+(?:#|//)", line.replace("{vex}\t", ""))[0].rstrip() for line in lines)
    return [line for line in code if re.match(r"(?!\.Ltmp).*:$", line) or re.match(r"\s+[a-z]", line)]


def tight_loops(lines):
    """The lines from a label to the conditional jump back to it, where no other label lies between."""
    labels = [i for i, line in enumerate(lines) if line.endswith(":")]
    for start, end in pairwise([*labels, len(lines)]):
        jump = rf"\s+(?:j(?!mp)\w+|b\.\w+|cbn?z\s+\w+,|tbn?z\s+.*,)\s+{re.escape(lines[start][:-1])}$"
        stop = next((i for i in range(start, end) if re.match(jump, lines[i])), None)
        if stop is not None:
            yield lines[start : stop + 1]


def k_loops(kernel, arch, intrinsic=None):
    """The tight loops with the row's matrix instruction."""
    intrinsic = intrinsic or kernel.intrinsic
    names = {INSTRUCTION[intrinsic], K_LOOP.get(intrinsic, INSTRUCTION[intrinsic])}
    return [
        loop
        for loop in tight_loops(assembly(kernel, arch))
        if all(any(re.match(rf"\s+{name}\b", x) for x in loop) for name in names)
    ]


@pytest.mark.parametrize(("kernel", "arch"), ALL)
def test_exported_functions_and_no_libm(kernel, arch):
    lines = assembly(kernel, arch)
    assert {f"__tvm_ffi_{name}:" for name in ("moe", "pack", "check_panel")} <= set(lines)
    called = {m[1] for line in lines if (m := re.match(r"\s+(?:callq|jmp|bl|b)\s+([a-zA-Z_]\w*)", line))}
    # Thread-locals are looked up by the dynamic linker; launchers have one too.
    foreign = {name for name in called if not name.startswith(("moe_", "TVMFFI", "__tvm_", "mem", "__tls_get_addr"))}
    assert foreign == set(), "a call per element, or a symbol that a serving process lacks"
    assert {"moe_add", "moe_wait", "moe_set_threads"} <= called


@pytest.mark.parametrize(("kernel", "arch"), X86_INTRINSIC)
def test_every_row_count_has_a_k_loop_of_its_instruction_alone(kernel, arch):
    assert_lean_loops(kernel, arch, k_loops(kernel, arch))


@pytest.mark.parametrize(("kernel", "arch"), [p for p in TILES if p.values[0].few])
def test_few_rows_have_k_loops_of_their_own_instruction(kernel, arch):
    assert_lean_loops(kernel.few, arch, k_loops(kernel, arch, kernel.few.intrinsic))


def assert_lean_loops(kernel, arch, loops):
    """An accumulator register for every row and vector, none of them in memory while the loop runs, and no calls."""
    name, seen = INSTRUCTION[kernel.intrinsic], set()
    register = r"%zmm\d+" if kernel.registers == 32 else r"%ymm\d+"
    for loop in loops:
        text = "\n".join(loop)
        assert "call" not in text, text
        assert not re.search(rf"{register}, [-\w]*\(", text), f"stores a register:\n{text}"
        assert not re.search(rf"\(%rsp[,)].*{register}$", text, re.MULTILINE), f"reloads a register:\n{text}"
        operands = [line.split()[-1] for line in loop if re.match(rf"\s+{name}\b", line)]
        assert all(re.fullmatch(register, operand) for operand in operands)
        per_sum = PER_SUM.get(kernel.intrinsic)  # None: each register of sums is an operand, however often LLVM unrolls
        seen.add(len(operands) / per_sum if per_sum else len(set(operands)))
    tiles = [style(kernel.style)(kernel, arch, rows) for rows in kernel.rows]
    assert seen == {tile.rows * tile.vectors // (1 + tile.halved) for tile in tiles}


@pytest.mark.parametrize(("kernel", "arch"), TILES)
def test_k_loops_of_tiles_load_and_multiply_only(kernel, arch):
    """Each product takes one load (2x2 tiles) or five for four (1x4); no tile is stored, and the loop itself is four more.

    Two instructions a product are the least that eight tiles allow: r x c of sums and min(r, c) + 1 of operands must fit, and
    each step loads r + c. Eight steps at a time leave an eighth of one for the loop.
    """
    name, seen = INSTRUCTION[kernel.intrinsic], {}
    for loop in k_loops(kernel, arch):
        text = "\n".join(loop)
        products, loads = (sum(bool(re.match(rf"\s+{x}\b", line)) for line in loop) for x in (name, "tileloadd"))
        assert len(loop) - 1 - products - loads <= 4, text
        assert not re.search(r"%rsp|tilestored|\bcall", text), text
        seen.setdefault(loads / products, []).append((len(loop) - 1) / products)
    assert seen.keys() == {1, 1.25}
    assert min(seen[1]) <= 2 + 1 / 8
    assert min(seen[1.25]) <= 2.25 + 1 / 8


@pytest.mark.parametrize(("kernel", "arch"), ARM_INTRINSIC)
def test_every_row_count_has_a_lean_k_loop_on_arm(kernel, arch):
    """Nothing rearranged, moved or on the stack, and few instructions beside the ones that multiply."""
    name, seen = INSTRUCTION[kernel.intrinsic], {}
    for loop in k_loops(kernel, arch):
        text = "\n".join(loop)
        assert not re.search(r"\b(zip|uzp|trn)[12]\b|\bmov\b|\[sp\b|\bbl\b|\bst[rp]\b", text), text
        products = [line.split()[1] for line in loop if re.match(rf"\s+{name}\b", line)]
        assert len(products) % len(set(products)) == 0
        steps = len(products) // len(set(products))
        seen.setdefault(len(set(products)), {}).setdefault(steps, set()).add(round((len(loop) - 1) / len(products), 2))
    assert seen.keys() == {tile_accumulators(kernel, rows) for rows in kernel.rows}
    if (
        kernel.row_group > 1
    ):  # tiles of 8, 4, 2 and 1 rows have 16 accumulators each, of 10 rows 20, of 6 and 12 rows 24
        assert all({16, 8} <= loops.keys() for loops in seen.values())
        eight, four, two, one = sorted(seen[16][16])
        assert eight <= 1.13
        assert four <= 1.17
        assert two <= 1.28
        assert one <= 1.33
        (ten,) = seen[20][16]
        assert ten <= 1.12
        twelve, six = sorted(seen[24][16])
        assert twelve <= 1.11
        assert six <= 1.13


def tile_accumulators(kernel, rows):
    """Registers of four sums."""
    return -(-rows // kernel.row_group) * (column_block(rows) // 2 if kernel.row_group > 1 else kernel.NR // 4)


@pytest.mark.parametrize(("kernel", "arch"), [p for p in ARM_INTRINSIC if "bf16" in p.values[0].features])
def test_results_are_rounded_by_hardware(kernel, arch):
    assert sum(bool(re.match(r"\s+bfcvtn2?\s", line)) for line in assembly(kernel, arch)) >= 8


@pytest.mark.parametrize(("kernel", "arch"), [p for p in INTRINSIC if p.values[0].intrinsic not in K_LOOP])
def test_the_instruction_stands_in_k_loops_only(kernel, arch):
    """All other uses are remainders of them: few."""
    name = INSTRUCTION[kernel.intrinsic]
    total = sum(bool(re.match(rf"\s+{name}\b", line)) for line in assembly(kernel, arch))
    inside = sum(bool(re.match(rf"\s+{name}\b", line)) for loop in k_loops(kernel, arch) for line in loop)
    assert inside >= total / 2


@pytest.mark.parametrize(("kernel", "arch"), ALL)
def test_no_instruction_of_a_feature_the_row_does_not_name(kernel, arch):
    text = "\n".join(assembly(kernel, arch))
    vnni = "avxvnni" if "avxvnni" in kernel.features else "avx512_vnni"
    wanted = {"vpdpbusd": vnni, "vdpbf16ps": "avx512_bf16", "vcvtne2?ps2bf16": "avx512_bf16"}
    wanted |= {"tile|ldtilecfg": "amx_tile", "tdpb[su]": "amx_int8", "tdpbf16ps": "amx_bf16"}
    wanted |= {"vpdpbssd": "avxvnniint8", r"%[xyz]mm(1[6-9]|2\d|3\d)": "avx512vl"}
    wanted |= {"%zmm": "avx512f", r"%k\d": "avx512f", "%ymm": "avx2", r"vfn?m(add|sub)\d": "fma", "vcvtph2ps": "f16c"}
    wanted |= {r"[us]dot": "dotprod", "[us]+mmla": "i8mm", "bf(dot|mmla|mlal|cvt)": "bf16"}
    for instruction, feature in wanted.items():
        if feature not in kernel.features:
            assert not re.search(rf"(^\s+|\s)({instruction})", text, re.MULTILINE), f"{instruction} without {feature}"


def assemble(text, arch):
    """GNU as held to the baseline: its complaints."""
    program = shutil.which("as")
    if program is None or isa.machine() != "x86_64":
        pytest.skip("needs GNU as for x86-64")
    done = subprocess.run([program, f"-march={arch}", "-o", "/dev/null"], input=text, capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if "Error" in line]


@pytest.mark.parametrize(("kernel", "arch"), X86_BASELINE)
def test_generic_x86_assembles_for_the_first_x86_64(kernel, arch):
    assert assemble("\n".join([*assembly(kernel, arch), ""]), "generic64") == []


@pytest.mark.parametrize(
    "line", ["pshufb %xmm1, %xmm0", "pmulld %xmm1, %xmm0", "popcntl %eax, %eax", "vpaddd %xmm1, %xmm2, %xmm3"]
)
def test_the_assembler_knows_what_the_first_x86_64_lacked(line):
    assert len(assemble(f"\t{line}\n", "generic64")) == 1
    assert assemble("\tpaddd %xmm1, %xmm0\n", "generic64") == []


@pytest.mark.parametrize(("kernel", "arch"), ARM_BASELINE)
def test_generic_aarch64_has_neon_only(kernel, arch):
    """No SVE registers, no half-precision arithmetic, no large-system atomics beyond what the baseline has."""
    text = "\n".join(assembly(kernel, arch))
    assert not re.search(r"\b[zp]\d+\.[bhsd]|\bptrue\b|\bwhilelo\b", text)
    assert not re.search(r"\bfml[as]l|\bfmla\s+v\d+\.[48]h|\b(ldadd|cas|swp)a?l?\s", text)
    assert re.search(r"\bfmla\s+v\d+\.4s|\bmla\s+v\d+\.4s|\bsmlal", text)
