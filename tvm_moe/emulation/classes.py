"""Classes of AArch64 instructions, by their encoding (Arm Architecture Reference Manual, C4)."""

from __future__ import annotations

import numpy as np

# (mask, bits): an instruction word of the class has these bits under one of its masks. The first class that fits counts.
CLASSES: dict[str, tuple[tuple[int, int], ...]] = {
    "smmla": ((0xFFE0FC00, 0x4E80A400), (0xFFE0FC00, 0x4E80AC00), (0xFFE0FC00, 0x6E80A400)),  # smmla, usmmla, ummla
    "bfmmla": ((0xFFE0FC00, 0x6E40EC00),),
    "dot": ((0x9FE0FC00, 0x0E809400), (0xBFE0FC00, 0x2E40FC00)),  # sdot, udot, bfdot
    "fmla": ((0xBFA0FC00, 0x0E20CC00), (0xBF80F400, 0x0F801000)),
    "vector load/store": ((0x0E000000, 0x0C000000),),
    "scalar load/store": ((0x0A000000, 0x08000000),),
    "branch": ((0x1C000000, 0x14000000),),
}


def classify(words: np.ndarray) -> np.ndarray:
    """Index into `CLASSES` of each word [n], len(CLASSES) for all others."""
    found = np.full(len(words), len(CLASSES))
    for index, fits in reversed(list(enumerate(CLASSES.values()))):
        for mask, bits in fits:
            found[words & np.uint32(mask) == bits] = index
    return found


def count(blocks: list[tuple[int, np.ndarray]]) -> dict[str, int]:
    """Executed instructions of each class, and of "all", of (times, words [n]) of each block."""
    totals = np.zeros(len(CLASSES) + 1, np.int64)
    for times, words in blocks:
        totals += times * np.bincount(classify(words), minlength=len(totals))
    return {"all": int(totals.sum()), **{name: int(n) for name, n in zip(CLASSES, totals, strict=False)}}
