"""Transpose of 16 x 16 units of 4 bytes (8 x 8 of 8), as LLVM shuffles that become each target's own permutes.

Rows are written past the caches, whole lines that nobody reads soon: no line is read from memory only to be overwritten
(a tenth to a third faster). The end of the parallel region orders these stores: its barrier is an atomic operation.
Eklundh's method: log2(lanes) rounds, each of which swaps the off-diagonal blocks of pairs of rows.
"""

from __future__ import annotations

LINE = 64  # bytes of a row: a cache line, and `to` starts at one


def function(unit_bytes: int) -> str:
    return f"moe_transpose_{unit_bytes}"


def lanes(unit_bytes: int) -> int:
    """Rows and columns of the block."""
    return LINE // unit_bytes


def llvm_ir(unit_bytes: int) -> str:
    """``(from, bytes between its rows, to, bytes between its rows)``: to[j][i] = from[i][j]."""
    n = lanes(unit_bytes)
    kind = f"<{n} x i{8 * unit_bytes}>"
    text = [f"define internal i32 @{function(unit_bytes)}(ptr %from, i64 %in, ptr %to, i64 %out) alwaysinline {{"]
    for i in range(n):
        text += [f"  %fo{i} = mul i64 %in, {i}", f"  %f{i} = getelementptr i8, ptr %from, i64 %fo{i}"]
        text += [f"  %r0_{i} = load {kind}, ptr %f{i}, align 1"]
    rounds = n.bit_length() - 1
    for level in range(rounds):
        text += swap_blocks(level, n, kind)
    for i in range(n):
        text += [f"  %to{i} = mul i64 %out, {i}", f"  %t{i} = getelementptr i8, ptr %to, i64 %to{i}"]
        text += [f"  store {kind} %r{rounds}_{i}, ptr %t{i}, align {LINE}, !nontemporal !{{i32 1}}"]
    return "\n".join([*text, "  ret i32 0", "}"])


def swap_blocks(level: int, n: int, kind: str) -> list[str]:
    """Row pairs (i, i + s), s = 2^level: the upper halves of blocks of 2s lanes change places with the lower ones."""
    s, text = 1 << level, []
    for i in (i for i in range(n) if not i & s):
        low = [n + j - s if j & s else j for j in range(n)]
        high = [n + j if j & s else j + s for j in range(n)]
        for target, mask in ((i, low), (i + s, high)):
            indices = ", ".join(f"i32 {m}" for m in mask)
            text.append(
                f"  %r{level + 1}_{target} = shufflevector {kind} %r{level}_{i}, {kind} %r{level}_{i + s}, "
                f"<{n} x i32> <{indices}>"
            )
    return text
