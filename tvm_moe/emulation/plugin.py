"""A plugin of qemu-user that counts how often each translated block ran, as LLVM IR that TVM compiles for this machine.

A guest program marks regions by system calls that no kernel has, numbers `MARK` + i. At one with i > 0 the plugin writes
what has run since the last one: of each block that ran, two int64 (times, instructions) and its instructions (uint32
each), then (i, 0). Declarations are those of qemu's plugin API version 1; Debian ships no header.
"""

from __future__ import annotations

import os
from pathlib import Path

MARK = 0x4D0E00

TEMPLATE = """
target triple = "{arch}-linux-gnu"
@qemu_plugin_version = global i32 1
@file = internal global i32 -1
@blocks = internal global ptr null  ; a list of {{ next, times, instructions, their words... }}
declare ptr @malloc(i64)
declare i32 @open(ptr, i32, ...)
declare i64 @write(i32, ptr, i64)
declare i64 @qemu_plugin_tb_n_insns(ptr)
declare ptr @qemu_plugin_tb_get_insn(ptr, i64)
declare ptr @qemu_plugin_insn_data(ptr)
declare void @qemu_plugin_register_vcpu_tb_exec_inline(ptr, i32, ptr, i64)
declare void @qemu_plugin_register_vcpu_tb_trans_cb(i64, ptr)
declare void @qemu_plugin_register_vcpu_syscall_cb(i64, ptr)

define internal void @translated(i64 %id, ptr %tb) {{
entry:
  %n = call i64 @qemu_plugin_tb_n_insns(ptr %tb)
  %words = shl i64 %n, 2
  %size = add i64 %words, 24
  %block = call ptr @malloc(i64 %size)
  %next = load ptr, ptr @blocks
  store ptr %next, ptr %block
  %times = getelementptr i8, ptr %block, i64 8
  store i64 0, ptr %times
  %count = getelementptr i8, ptr %block, i64 16
  store i64 %n, ptr %count
  %code = getelementptr i8, ptr %block, i64 24
  br label %look
look:
  %i = phi i64 [ 0, %entry ], [ %after, %copy ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %copy, label %done
copy:
  %insn = call ptr @qemu_plugin_tb_get_insn(ptr %tb, i64 %i)
  %data = call ptr @qemu_plugin_insn_data(ptr %insn)
  %word = load i32, ptr %data, align 1
  %to = getelementptr i32, ptr %code, i64 %i
  store i32 %word, ptr %to
  %after = add i64 %i, 1
  br label %look
done:
  store ptr %block, ptr @blocks
  call void @qemu_plugin_register_vcpu_tb_exec_inline(ptr %tb, i32 0, ptr %times, i64 1)
  ret void
}}

define internal void @called(i64 %id, i32 %cpu, i64 %number, i64, i64, i64, i64, i64, i64, i64, i64) {{
entry:
  %high = and i64 %number, -256
  %ours = icmp eq i64 %high, {mark}
  br i1 %ours, label %mark, label %end
mark:
  %file = load i32, ptr @file
  %region = and i64 %number, 255
  %named = icmp ne i64 %region, 0
  %first = load ptr, ptr @blocks
  br label %look
look:
  %block = phi ptr [ %first, %mark ], [ %next, %following ]
  %last = icmp eq ptr %block, null
  br i1 %last, label %close, label %one
one:
  %next = load ptr, ptr %block
  %times.at = getelementptr i8, ptr %block, i64 8
  %times = load i64, ptr %times.at
  %ran = icmp ne i64 %times, 0
  %wanted = and i1 %ran, %named
  br i1 %wanted, label %say, label %following
say:
  %n.at = getelementptr i8, ptr %block, i64 16
  %n = load i64, ptr %n.at
  %words = shl i64 %n, 2
  %size = add i64 %words, 16
  %said = call i64 @write(i32 %file, ptr %times.at, i64 %size)
  br label %following
following:
  store i64 0, ptr %times.at
  br label %look
close:
  br i1 %named, label %tell, label %end
tell:
  %pair = alloca [2 x i64]
  store i64 %region, ptr %pair
  %second = getelementptr i64, ptr %pair, i64 1
  store i64 0, ptr %second
  %told = call i64 @write(i32 %file, ptr %pair, i64 16)
  br label %end
end:
  ret void
}}

; Its one option is the file to write: out=FILE.
define i32 @qemu_plugin_install(i64 %id, ptr %info, i32 %argc, ptr %argv) {{
  %option = load ptr, ptr %argv
  %name = getelementptr i8, ptr %option, i64 4
  %file = call i32 (ptr, i32, ...) @open(ptr %name, i32 {flags}, i32 384)
  store i32 %file, ptr @file
  call void @qemu_plugin_register_vcpu_tb_trans_cb(i64 %id, ptr @translated)
  call void @qemu_plugin_register_vcpu_syscall_cb(i64 %id, ptr @called)
  ret i32 0
}}
"""


def llvm_ir(arch: str) -> str:
    return TEMPLATE.format(arch=arch, mark=MARK, flags=os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def build_into(folder: Path) -> Path:
    """The plugin for this machine, compiled and linked."""
    import tvm

    from ..compiler import build
    from ..kernels import machine

    (folder / "plugin.ll").write_text(llvm_ir(machine()))
    tvm.runtime.load_module(str(folder / "plugin.ll")).write_to_file(str(folder / "plugin.o"))
    made = folder / "plugin.so"
    tvm.support.cc.create_shared(str(made), [str(folder / "plugin.o")], cc=build.linker(machine()))
    return made
