"""Transpose of 16 x 16 units of 4 bytes (8 x 8 of 8, 32 x 32 of 2), as LLVM shuffles that become each target's own permutes.

Rows are written past the caches, whole lines that nobody reads soon: no line is read from memory only to be overwritten
(a tenth to a third faster). The end of the parallel region orders these stores: its barrier is an atomic operation.
Eklundh's method: log2(lanes) rounds, each of which swaps the off-diagonal blocks of pairs of rows.
"""

from __future__ import annotations

from tvm import tirx

LINE = 64  # bytes of a row: a cache line, and `to` starts at one


def lanes(unit_bytes: int) -> int:
    """Rows and columns of the block."""
    return LINE // unit_bytes


def function(unit_bytes: int, sums: bool) -> str:
    return f"moe_transpose_{'sums_' if sums else ''}{unit_bytes}"


def call(
    unit_bytes: int, source: tirx.PrimExpr, source_step: tirx.PrimExpr, to: tirx.PrimExpr, to_step: tirx.PrimExpr,
    sums: tirx.PrimExpr | None,
) -> tirx.PrimExpr:  # fmt: skip
    """One block: to[j][i] = source[i][j], rows ``step`` bytes apart; ``sums`` as in `llvm_ir`."""
    more = () if sums is None else (sums,)
    return tirx.call_extern("int32", function(unit_bytes, bool(more)), source, source_step, to, to_step, *more)


def llvm_ir(unit_bytes: int, sums: bool) -> str:
    """What `call` calls; with ``sums``, an i32 for every row of the source, the int8 weights of the row are added to it."""
    n = lanes(unit_bytes)
    kind = f"<{n} x i{8 * unit_bytes}>"
    more = ", ptr %sums" if sums else ""
    text = [
        f"define internal i32 @{function(unit_bytes, sums)}(ptr %from, i64 %in, ptr %to, i64 %out{more}) alwaysinline {{"
    ]
    for i in range(n):
        text += [f"  %fo{i} = mul i64 %in, {i}", f"  %f{i} = getelementptr i8, ptr %from, i64 %fo{i}"]
        text += [f"  %r0_{i} = load {kind}, ptr %f{i}, align 1"]
    rounds = n.bit_length() - 1
    for level in range(rounds):
        text += swap_blocks(level, n, kind)
    for i in range(n):
        text += [f"  %to{i} = mul i64 %out, {i}", f"  %t{i} = getelementptr i8, ptr %to, i64 %to{i}"]
        text += [f"  store {kind} %r{rounds}_{i}, ptr %t{i}, align {LINE}, !nontemporal !{{i32 1}}"]
    if sums:
        text += add_sums([f"%r{rounds}_{i}" for i in range(n)], kind)
    return "\n".join([*text, "  ret i32 0", "}"])


def add_sums(vectors: list[str], kind: str) -> list[str]:
    """Units of four int8: pairs as i16 (sixteen vectors of them stay below 2^12), then pairs of those as i32."""
    pairs, words = f"<{LINE // 2} x i16>", f"<{LINE // 4} x i32>"

    def both(x: str, of: str, bits: int) -> list[str]:
        """The signed low and high half of every lane, added."""
        by = f"splat (i{2 * bits} {bits})"
        return [
            f"  {x}.up = shl {of} {x}, {by}", f"  {x}.low = ashr {of} {x}.up, {by}", f"  {x}.high = ashr {of} {x}, {by}",
            f"  {x}.sum = add {of} {x}.low, {x}.high",
        ]  # fmt: skip

    text, total = [], "zeroinitializer"
    for i, vector in enumerate(vectors):
        text += [f"  %b{i} = bitcast {kind} {vector} to {pairs}", *both(f"%b{i}", pairs, 8)]
        text += [f"  %total{i} = add {pairs} {total}, %b{i}.sum"]
        total = f"%total{i}"
    return [
        *text, f"  %w = bitcast {pairs} {total} to {words}", *both("%w", words, 16),
        f"  %old = load {words}, ptr %sums, align 4", f"  %new = add {words} %old, %w.sum",
        f"  store {words} %new, ptr %sums, align 4",
    ]  # fmt: skip


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
