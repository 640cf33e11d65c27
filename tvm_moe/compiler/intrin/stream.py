"""AArch64 loads of up to four registers by one instruction that also moves its address on (ld1, post-indexed), as LLVM text.

LLVM folds the step into such a load only where the next address is the load's own plus the step, not the loop's start plus a
constant, which it makes of every chain of additions. And its scheduler would rather load everything first, and spill. Pieces
of empty assembly stand against both: they hide where an address comes from, and tie a load to the products before it.
"""

from __future__ import annotations

REGISTER = 16  # bytes
MOST = 4  # registers one load brings
MOST_SUMS = 16  # sums that one load is tied to


def numbers(first: int, count: int) -> str:
    return ", ".join(f"i32 {i}" for i in range(first, first + count))


def load(count: int) -> str:
    """``moe_stream_<count>(cursor, step)``: the registers at the address in ``cursor``, which moves on by ``step`` bytes."""
    fields = ", ".join(["<16 x i8>"] * count)
    if count == 1:  # has no intrinsic of its own
        declared, loaded = "", "  %v0 = load <16 x i8>, ptr %p, align 1"
    else:
        declared = f"declare {{ {fields} }} @llvm.aarch64.neon.ld1x{count}.v16i8.p0(ptr)"
        loaded = f"  %v = call {{ {fields} }} @llvm.aarch64.neon.ld1x{count}.v16i8.p0(ptr %p)\n" + "\n".join(
            f"  %v{i} = extractvalue {{ {fields} }} %v, {i}" for i in range(count)
        )
    v = [f"%v{i}" if i < count else "poison" for i in range(MOST)]
    return f"""
{declared}
define <64 x i8> @moe_stream_{count}(ptr %cursor, i64 %step) #1 {{
  %p = load ptr, ptr %cursor
{loaded}
  %low = shufflevector <16 x i8> {v[0]}, <16 x i8> {v[1]}, <32 x i32> <{numbers(0, 32)}>
  %high = shufflevector <16 x i8> {v[2]}, <16 x i8> {v[3]}, <32 x i32> <{numbers(0, 32)}>
  %all = shufflevector <32 x i8> %low, <32 x i8> %high, <64 x i32> <{numbers(0, 64)}>
  %next = getelementptr i8, ptr %p, i64 %step
  %opaque = call ptr asm "", "=r,0"(ptr %next)
  store ptr %opaque, ptr %cursor
  ret <64 x i8> %all
}}"""


def part(size: int, index: int) -> str:
    """``moe_part_<size>_<index>``: so many bytes of what a load brought."""
    return f"""
define <{size} x i8> @moe_part_{size}_{index}(<64 x i8> %v) #1 {{
  %part = shufflevector <64 x i8> %v, <64 x i8> poison, <{size} x i32> <{numbers(size * index, size)}>
  ret <{size} x i8> %part
}}"""


def after(count: int) -> str:
    """``moe_stream_after_<count>(cursor, sums...)``: a load at the cursor comes after these sums, and they before it."""
    sums = range(count)
    types = ", ".join(["ptr", *["<16 x i8>"] * count])
    constraints = ",".join(["=r", *["=w"] * count, *map(str, range(count + 1))])
    loads = "\n".join(f"  %s{i} = load <16 x i8>, ptr %sum{i}" for i in sums)
    stores = "\n".join(
        f"  %t{i} = extractvalue {{ {types} }} %all, {i + 1}\n  store <16 x i8> %t{i}, ptr %sum{i}" for i in sums
    )
    return f"""
define void @moe_stream_after_{count}(ptr %cursor, {", ".join(f"ptr %sum{i}" for i in sums)}) #1 {{
  %p = load ptr, ptr %cursor
{loads}
  %all = call {{ {types} }} asm "", "{constraints}"(ptr %p, {", ".join(f"<16 x i8> %s{i}" for i in sums)})
  %q = extractvalue {{ {types} }} %all, 0
  store ptr %q, ptr %cursor
{stores}
  ret void
}}"""


def llvm_ir(mcpu: str) -> str:
    parts = [part(size, i) for size in (REGISTER // 2, REGISTER) for i in range(MOST * REGISTER // size)]
    loads, ties = (load(n + 1) for n in range(MOST)), (after(n + 1) for n in range(MOST_SUMS))
    return f"""{"".join([*loads, *parts, *ties])}
define void @moe_stream_from(ptr %cursor, ptr %start) #1 {{
  store ptr %start, ptr %cursor
  ret void
}}
define i64 @moe_stream_step(i64 %step) #1 {{
  %opaque = call i64 asm "", "=r,0"(i64 %step)
  ret i64 %opaque
}}
attributes #1 = {{ alwaysinline "target-features"="{mcpu}" }}
"""
