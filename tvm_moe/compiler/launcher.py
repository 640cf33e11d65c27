"""The OpenMP launcher and the few atomics of the driver, as LLVM IR that TVM compiles and links into every module.

A parallel region of the module runs on the OpenMP team already in the process (the one torch started): the loader puts
the address of GOMP_parallel into `moe_gomp_parallel` and `moe_launch` into the library's own launch pointer. Tasks are
handed out by a counter, so that a team of any size, even one thread, completes all of them. Null means serial.
"""

from __future__ import annotations

PAUSE = {"x86_64": 'call void asm sideeffect "pause", ""()', "aarch64": 'call void asm sideeffect "yield", ""()'}

CPUID = """
define void @moe_cpuid(i32 %leaf, i32 %sub, ptr %out) {
  %r = call { i32, i32, i32, i32 } asm sideeffect "cpuid", "={ax},={bx},={cx},={dx},{ax},{cx}"(i32 %leaf, i32 %sub)
  %a = extractvalue { i32, i32, i32, i32 } %r, 0
  %b = extractvalue { i32, i32, i32, i32 } %r, 1
  %c = extractvalue { i32, i32, i32, i32 } %r, 2
  %d = extractvalue { i32, i32, i32, i32 } %r, 3
  store i32 %a, ptr %out
  %b.at = getelementptr i32, ptr %out, i32 1
  store i32 %b, ptr %b.at
  %c.at = getelementptr i32, ptr %out, i32 2
  store i32 %c, ptr %c.at
  %d.at = getelementptr i32, ptr %out, i32 3
  store i32 %d, ptr %d.at
  ret void
}

define i64 @moe_xgetbv(i32 %index) {
  %r = call { i32, i32 } asm sideeffect "xgetbv", "={ax},={dx},{cx}"(i32 %index)
  %low = extractvalue { i32, i32 } %r, 0
  %high = extractvalue { i32, i32 } %r, 1
  %l = zext i32 %low to i64
  %h = zext i32 %high to i64
  %s = shl i64 %h, 32
  %v = or i64 %s, %l
  ret i64 %v
}
"""

TEMPLATE = """
target triple = "{arch}-linux-gnu"
@moe_gomp_parallel = global ptr null
@moe_launch_ptr = global ptr @moe_launch
@moe_threads = thread_local global i32 1
%job = type {{ ptr, ptr, i32, i32, i32 }}
declare i32 @sched_yield()

define internal void @moe_body(ptr %job) {{
  %f = load ptr, ptr %job
  %c.at = getelementptr %job, ptr %job, i32 0, i32 1
  %c = load ptr, ptr %c.at
  %n.at = getelementptr %job, ptr %job, i32 0, i32 2
  %n = load i32, ptr %n.at
  %next.at = getelementptr %job, ptr %job, i32 0, i32 3
  %error.at = getelementptr %job, ptr %job, i32 0, i32 4
  %env = alloca {{ ptr, i32 }}
  store ptr null, ptr %env
  %env.n = getelementptr {{ ptr, i32 }}, ptr %env, i32 0, i32 1
  store i32 %n, ptr %env.n
  br label %take
take:
  %i = atomicrmw add ptr %next.at, i32 1 acq_rel
  %more = icmp slt i32 %i, %n
  br i1 %more, label %run, label %done
run:
  %r = call i32 %f(i32 %i, ptr %env, ptr %c)
  %failed = icmp ne i32 %r, 0
  br i1 %failed, label %fail, label %take
fail:
  store atomic i32 %r, ptr %error.at monotonic, align 4
  br label %take
done:
  ret void
}}

define i32 @moe_launch(ptr %f, ptr %c, i32 %unused) {{
  %job = alloca %job
  %n = load i32, ptr @moe_threads
  store ptr %f, ptr %job
  %c.at = getelementptr %job, ptr %job, i32 0, i32 1
  store ptr %c, ptr %c.at
  %n.at = getelementptr %job, ptr %job, i32 0, i32 2
  store i32 %n, ptr %n.at
  %next.at = getelementptr %job, ptr %job, i32 0, i32 3
  store i32 0, ptr %next.at
  %error.at = getelementptr %job, ptr %job, i32 0, i32 4
  store i32 0, ptr %error.at
  %gomp = load ptr, ptr @moe_gomp_parallel
  %absent = icmp eq ptr %gomp, null
  %one = icmp sle i32 %n, 1
  %alone = or i1 %absent, %one
  br i1 %alone, label %serial, label %team
serial:
  call void @moe_body(ptr %job)
  br label %end
team:
  call void %gomp(ptr @moe_body, ptr %job, i32 %n, i32 0)
  br label %end
end:
  %error = load i32, ptr %error.at
  ret i32 %error
}}

define i32 @moe_set_threads(i32 %n) {{
  store i32 %n, ptr @moe_threads
  ret i32 0
}}

define i64 @moe_add(ptr %p, i64 %v) {{
  %old = atomicrmw add ptr %p, i64 %v acq_rel
  %new = add i64 %old, %v
  ret i64 %new
}}

define i32 @moe_wait(ptr %p, i64 %least) {{
entry:
  br label %look
look:
  %spins = phi i32 [ 0, %entry ], [ %again, %relax ]
  %v = load atomic i64, ptr %p acquire, align 8
  %there = icmp sge i64 %v, %least
  br i1 %there, label %done, label %spin
spin:
  {pause}
  %again = add i32 %spins, 1
  %long = icmp ugt i32 %again, 20000
  br i1 %long, label %yield, label %relax
yield:
  %y = call i32 @sched_yield()
  br label %relax
relax:
  br label %look
done:
  ret i32 0
}}
"""


def llvm_ir(arch: str) -> str:
    """The launcher for an architecture; on x86-64 with CPUID and XGETBV, which feature detection reads."""
    return TEMPLATE.format(arch=arch, pause=PAUSE[arch]) + (CPUID if arch == "x86_64" else "")
