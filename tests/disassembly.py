"""Machine code of whole files: disassembled by binutils, and assembled again for a CPU that has some features and no more."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tvm_moe import isa

EXTENSIONS = {"avxvnni": "avx_vnni", "avxvnniint8": "avx_vnni_int8"}  # as GNU as names them
# The first CPU passes over the C runtime's ENDBR64 (ibt); XGETBV (xsave) is used only where CPUID shows it. Dot products are
# an option of Armv8.2 to GNU as and in fact.
BASELINE = {
    "x86_64": ("generic64+ibt+xsave",) * 2,
    "aarch64": ("armv8-a", "armv8.2-a"),
}  # without features, and with some
PREFIXES = b"\x26\x2e\x36\x3e\x64\x65\x66\x67\xf0\xf2\xf3"
ENCODINGS = {b"\x62": ("EVEX", "avx512f"), b"\xc4": ("VEX", "avx2"), b"\xc5": ("VEX", "avx2")}  # of 64-bit code
TARGET = r"[0-9a-f]+ <[^>]*>$"  # of a jump, or a page


@dataclass(frozen=True)
class Instruction:
    code: bytes
    text: str

    @property
    def source(self) -> str:
        """As an assembler takes it: comments away, and every target here."""
        text = re.sub(rf"(?<=[\s,]){TARGET}", ".", re.split(r"\s+(?:# |//|;)", self.text)[0].rstrip())
        return re.sub(r"^(?:(?:bnd|notrack|cs|data16) )+", "", text)


def tool(name: str, arch: str) -> str:
    found = shutil.which(f"{arch.replace('_', '-')}-linux-gnu-{name}") or shutil.which(f"{arch}-linux-gnu-{name}")
    found = found or (shutil.which(name) if isa.machine() == arch else None)
    if found is None:
        pytest.skip(f"no {name} for {arch} (Debian: binutils-{arch.replace('_', '-')}-linux-gnu)")
    return found


def instructions(file: Path, arch: str) -> list[Instruction]:
    """All that lies in the executable sections of ``file``."""
    command = [tool("objdump", arch), "--disassemble", "--wide", "--insn-width=16", str(file)]
    if arch == "aarch64":
        command.remove("--insn-width=16")
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [re.match(r"\s*[0-9a-f]+:\t([0-9a-f ]+)\t(.*)", line) for line in lines]
    return [Instruction(bytes.fromhex(m[1]), m[2].strip()) for m in found if m]


def above(code: list[Instruction], arch: str, features: frozenset[str]) -> list[str]:
    """What a CPU with these features and no more does not execute: an assembler held to it complains."""
    names = sorted(EXTENSIONS.get(f, f) for f in features)
    march = "+".join([BASELINE[arch][bool(names)], *names])
    texts = sorted({i.source for i in code})
    done = subprocess.run(
        [tool("as", arch), f"-march={march}", "-o", "/dev/null"],
        input="\n".join([*texts, ""]), capture_output=True, text=True,
    )  # fmt: skip
    return [line for line in done.stderr.splitlines() if "Error" in line] + encodings(code, arch, features)


def encodings(code: list[Instruction], arch: str, features: frozenset[str]) -> list[str]:
    """x86: an EVEX or VEX prefix, which an assembler would not need for every such instruction."""
    if arch != "x86_64":
        return []
    found = {ENCODINGS.get(i.code.lstrip(PREFIXES)[:1], ("", "")) for i in code}
    return [f"{name} without {feature}" for name, feature in sorted(found) if name and feature not in features]
