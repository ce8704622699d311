"""The native step driver, as MLIR text: runs a step's kernels in order on all threads, without libc and without Python.

Threads meet at a barrier after every kernel. Who waits spins, then spins while giving way to other threads, then sleeps
in a futex: a thread that the system has preempted holds up the others for tens of milliseconds, and spinning would keep
it off the core it needs. Giving way matters when two threads find themselves on one core, where the system may leave
them for long: without it a barrier took 23-85 µs on two cores with 2-4 threads, with it 0.08, 3.8 and 7.5 µs. But where
another program takes the core, it takes it for its whole slice: with three busy programs beside two threads on two
cores, steps took 260 ms that take 21 ms without giving way. So a thread that was kept waiting a few times in a step
gives way no more in it.
"""

from __future__ import annotations

import ctypes

from adaptc.backends.cpu.context import CYCLES, RUN, STEP, WORKER, Command, Context, Word

_PATIENCE = 2
"""Times in a step that giving way may cost a thread more than 2^4 budgets of spinning."""

_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 128, 129, 2**31 - 1  # linux/futex.h, with FUTEX_PRIVATE_FLAG

MACHINES: dict[str, dict[str, str]] = {
    "x86_64": {
        "pause": 'llvm.call_intrinsic "llvm.x86.sse2.pause"() : () -> ()',
        "yield": (
            "%number = llvm.mlir.constant(24 : i64) : i64\n"
            '  %ignored = llvm.inline_asm has_side_effects "syscall", "={rax},{rax},~{rcx},~{r11},~{memory}" %number'
            " : (i64) -> i64"
        ),
        # cycles of the invariant time-stamp counter
        "cycles": '%cycles = llvm.call_intrinsic "llvm.readcyclecounter"() : () -> i64',
        "futex": (
            "%number = llvm.mlir.constant(202 : i64) : i64\n  %none = llvm.mlir.zero : !llvm.ptr\n"
            '  %ignored = llvm.inline_asm has_side_effects "syscall", '
            '"={rax},{rax},{rdi},{rsi},{rdx},{r10},~{rcx},~{r11},~{memory}" %number, %word, %operation, %value, %none'
            " : (i64, !llvm.ptr, i64, i64, !llvm.ptr) -> i64"
        ),
    },
    "aarch64": {
        "pause": 'llvm.inline_asm has_side_effects "yield", "" : () -> ()',
        "yield": (
            "%number = llvm.mlir.constant(124 : i64) : i64\n"
            '  %ignored = llvm.inline_asm has_side_effects "svc #0", "={x0},{x8},~{memory}" %number : (i64) -> i64'
        ),
        # ticks of the virtual counter, which user programs may read
        "cycles": (
            '%cycles = llvm.inline_asm has_side_effects "mrs $0, cntvct_el0", "=r,~{memory}" : () -> i64'
        ),
        "futex": (
            "%number = llvm.mlir.constant(98 : i64) : i64\n  %none = llvm.mlir.zero : !llvm.ptr\n"
            '  %ignored = llvm.inline_asm has_side_effects "svc #0", '
            '"={x0},{x8},{x0},{x1},{x2},{x3},~{memory}" %number, %word, %operation, %value, %none'
            " : (i64, !llvm.ptr, i64, i64, !llvm.ptr) -> i64"
        ),
    },
}
"""What differs between machines: a spin hint, the system calls sched_yield and futex (word, operation, value), and a
cycle counter."""


def driver_text(machine: str) -> str:
    """MLIR module of the step driver for ``machine`` (a key of MACHINES). It exports

    - ``void adaptc_run(Context*, n)``: starts a step on n-1 parked workers, takes part as thread 0, returns at its end;
    - ``void adaptc_worker(Context*, tid, n)``: waits for steps and takes part in them as thread ``tid``, until quit;
    - ``void adaptc_step(Context*, tid, n)``: one thread's part of one step;
    - ``int64_t adaptc_cycles()``: the counter that ``times`` are taken from.
    """
    asm = MACHINES[machine]
    at = {name: getattr(Context, name).offset for name, *_ in Context._fields_}
    return f"""
func.func private @field(%base: !llvm.ptr, %offset: i64) -> !llvm.ptr {{
  %p = llvm.getelementptr %base[%offset] : (!llvm.ptr, i64) -> !llvm.ptr, i8
  return %p : !llvm.ptr
}}

func.func private @give_way() {{
  {asm["yield"]}
  return
}}

func.func private @cycles() -> i64 {{
  {asm["cycles"]}
  return %cycles : i64
}}

func.func private @futex(%word: !llvm.ptr, %operation: i64, %value: i64) {{
  {asm["futex"]}
  return
}}

// Waits until the word's generation is no longer %seen: spins for an eighth of %spin cycles, gives way at every turn
// for the rest of them unless that was dear too often (%dear counts), then sleeps. The sleeper announces itself before
// the kernel compares the generation, and the signaller changes the generation before it looks for sleepers: one of them
// sees the other.
func.func private @wait(%word: !llvm.ptr, %seen: i32, %spin: i64, %dear: !llvm.ptr) {{
  %one = arith.constant 1 : i32
  %once = arith.constant 1 : i64
  %eighth = arith.constant 3 : i64
  %sixteen = arith.constant 4 : i64
  %patience = arith.constant {_PATIENCE} : i64
  %sleepers_at = arith.constant {Word.sleepers.offset} : i64
  %futex_wait = arith.constant {_FUTEX_WAIT} : i64
  %first = llvm.load %word atomic acquire {{alignment = 4 : i64}} : !llvm.ptr -> i32
  %already = arith.cmpi ne, %first, %seen : i32
  cf.cond_br %already, ^done, ^begin
^begin:
  %start = func.call @cycles() : () -> i64
  cf.br ^spin
^spin:
  {asm["pause"]}
  %spun = llvm.load %word atomic acquire {{alignment = 4 : i64}} : !llvm.ptr -> i32
  %changed = arith.cmpi ne, %spun, %seen : i32
  cf.cond_br %changed, ^done, ^budget
^budget:
  %now = func.call @cycles() : () -> i64
  %spent = arith.subi %now, %start : i64
  %more = arith.cmpi slt, %spent, %spin : i64
  cf.cond_br %more, ^again, ^sleep
^again:
  %alone = arith.shrsi %spin, %eighth : i64
  %long = arith.cmpi sgt, %spent, %alone : i64
  %times = llvm.load %dear : !llvm.ptr -> i64
  %patient = arith.cmpi slt, %times, %patience : i64
  %giving = arith.andi %long, %patient : i1
  cf.cond_br %giving, ^yield, ^spin
^yield:
  func.call @give_way() : () -> ()
  %back = func.call @cycles() : () -> i64
  %away = arith.subi %back, %now : i64
  %most = arith.shli %spin, %sixteen : i64
  %was_dear = arith.cmpi sgt, %away, %most : i64
  cf.cond_br %was_dear, ^count, ^spin
^count:
  %more_times = arith.addi %times, %once : i64
  llvm.store %more_times, %dear : i64, !llvm.ptr
  cf.br ^spin
^sleep:
  %sleepers = func.call @field(%word, %sleepers_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %before = llvm.atomicrmw add %sleepers, %one seq_cst : !llvm.ptr, i32
  %expected = arith.extui %seen : i32 to i64
  func.call @futex(%word, %futex_wait, %expected) : (!llvm.ptr, i64, i64) -> ()
  %after = llvm.atomicrmw sub %sleepers, %one seq_cst : !llvm.ptr, i32
  %woken = llvm.load %word atomic acquire {{alignment = 4 : i64}} : !llvm.ptr -> i32
  %over = arith.cmpi ne, %woken, %seen : i32
  cf.cond_br %over, ^done, ^sleep
^done:
  return
}}

func.func private @signal(%word: !llvm.ptr) {{
  %one = arith.constant 1 : i32
  %zero = arith.constant 0 : i32
  %sleepers_at = arith.constant {Word.sleepers.offset} : i64
  %futex_wake = arith.constant {_FUTEX_WAKE} : i64
  %everyone = arith.constant {_EVERYONE} : i64
  %before = llvm.atomicrmw add %word, %one seq_cst : !llvm.ptr, i32
  %p = func.call @field(%word, %sleepers_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %sleepers = llvm.load %p atomic seq_cst {{alignment = 4 : i64}} : !llvm.ptr -> i32
  %some = arith.cmpi ne, %sleepers, %zero : i32
  cf.cond_br %some, ^wake, ^done
^wake:
  func.call @futex(%word, %futex_wake, %everyone) : (!llvm.ptr, i64, i64) -> ()
  cf.br ^done
^done:
  return
}}

// The generation is read before arriving: afterwards the barrier may open at any moment.
func.func private @barrier(%context: !llvm.ptr, %n: i64, %spin: i64, %dear: !llvm.ptr) {{
  %one = arith.constant 1 : i32
  %zero = arith.constant 0 : i32
  %arrived_at = arith.constant {at["arrived"]} : i64
  %passed_at = arith.constant {at["passed"]} : i64
  %arrived = func.call @field(%context, %arrived_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %passed = func.call @field(%context, %passed_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %seen = llvm.load %passed atomic acquire {{alignment = 4 : i64}} : !llvm.ptr -> i32
  %before = llvm.atomicrmw add %arrived, %one acq_rel : !llvm.ptr, i32
  %threads = arith.trunci %n : i64 to i32
  %last = arith.subi %threads, %one : i32
  %is_last = arith.cmpi eq, %before, %last : i32
  cf.cond_br %is_last, ^open, ^wait
^open:
  llvm.store %zero, %arrived atomic monotonic {{alignment = 4 : i64}} : i32, !llvm.ptr
  func.call @signal(%passed) : (!llvm.ptr) -> ()
  cf.br ^done
^wait:
  func.call @wait(%passed, %seen, %spin, %dear) : (!llvm.ptr, i32, i64, !llvm.ptr) -> ()
  cf.br ^done
^done:
  return
}}

// Everything is loaded before the first kernel: once its last barrier has opened, thread 0 may prepare the next step.
llvm.func @{STEP}(%context: !llvm.ptr, %tid: i64, %n: i64) {{
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %size = arith.constant {ctypes.sizeof(Command)} : i64
  %buffers_at = arith.constant {Command.buffers.offset} : i64
  %count_at = arith.constant {at["count"]} : i64
  %symbols_at = arith.constant {at["symbols"]} : i64
  %times_at = arith.constant {at["times"]} : i64
  %spin_at = arith.constant {at["spin"]} : i64
  %null = llvm.mlir.zero : !llvm.ptr
  %commands = llvm.load %context : !llvm.ptr -> !llvm.ptr
  %count_p = func.call @field(%context, %count_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %count = llvm.load %count_p : !llvm.ptr -> i64
  %symbols_p = func.call @field(%context, %symbols_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %symbols = llvm.load %symbols_p : !llvm.ptr -> !llvm.ptr
  %times_p = func.call @field(%context, %times_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %times = llvm.load %times_p : !llvm.ptr -> !llvm.ptr
  %spin_p = func.call @field(%context, %spin_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %spin = llvm.load %spin_p : !llvm.ptr -> i64
  %wanted = llvm.icmp "ne" %times, %null : !llvm.ptr
  %is_first = arith.cmpi eq, %tid, %zero : i64
  %timed = arith.andi %wanted, %is_first : i1
  %alone = arith.cmpi eq, %n, %one : i64
  %dear = llvm.alloca %one x i64 : (i64) -> !llvm.ptr
  llvm.store %zero, %dear : i64, !llvm.ptr
  scf.if %timed {{
    %t = func.call @cycles() : () -> i64
    llvm.store %t, %times : i64, !llvm.ptr
  }}
  scf.for %i = %zero to %count step %one : i64 {{
    %offset = arith.muli %i, %size : i64
    %command = func.call @field(%commands, %offset) : (!llvm.ptr, i64) -> !llvm.ptr
    %kernel = llvm.load %command : !llvm.ptr -> !llvm.ptr
    %buffers_p = func.call @field(%command, %buffers_at) : (!llvm.ptr, i64) -> !llvm.ptr
    %buffers = llvm.load %buffers_p : !llvm.ptr -> !llvm.ptr
    llvm.call %kernel(%buffers, %symbols, %tid, %n) : !llvm.ptr, (!llvm.ptr, !llvm.ptr, i64, i64) -> ()
    scf.if %alone {{
    }} else {{
      func.call @barrier(%context, %n, %spin, %dear) : (!llvm.ptr, i64, i64, !llvm.ptr) -> ()
    }}
    scf.if %timed {{
      %t = func.call @cycles() : () -> i64
      %next = arith.addi %i, %one : i64
      %p = llvm.getelementptr %times[%next] : (!llvm.ptr, i64) -> !llvm.ptr, i64
      llvm.store %t, %p : i64, !llvm.ptr
    }}
  }}
  llvm.return
}}

llvm.func @{RUN}(%context: !llvm.ptr, %n: i64) {{
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %started_at = arith.constant {at["started"]} : i64
  %others = arith.cmpi sgt, %n, %one : i64
  scf.if %others {{
    %started = func.call @field(%context, %started_at) : (!llvm.ptr, i64) -> !llvm.ptr
    func.call @signal(%started) : (!llvm.ptr) -> ()
  }}
  llvm.call @{STEP}(%context, %zero, %n) : (!llvm.ptr, i64, i64) -> ()
  llvm.return
}}

// A worker can't miss a step: the next one starts only after it has passed this one's last barrier.
llvm.func @{WORKER}(%context: !llvm.ptr, %tid: i64, %n: i64) {{
  %none = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %zero = arith.constant 0 : i64
  %started_at = arith.constant {at["started"]} : i64
  %spin_at = arith.constant {at["spin"]} : i64
  %quit_at = arith.constant {at["quit"]} : i64
  %started = func.call @field(%context, %started_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %spin_p = func.call @field(%context, %spin_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %quit_p = func.call @field(%context, %quit_at) : (!llvm.ptr, i64) -> !llvm.ptr
  %spin = llvm.load %spin_p : !llvm.ptr -> i64
  %once = llvm.mlir.constant(1 : i64) : i64
  %dear = llvm.alloca %once x i64 : (i64) -> !llvm.ptr
  llvm.br ^park(%none : i32)
^park(%seen: i32):
  llvm.store %zero, %dear : i64, !llvm.ptr
  func.call @wait(%started, %seen, %spin, %dear) : (!llvm.ptr, i32, i64, !llvm.ptr) -> ()
  %quit = llvm.load %quit_p atomic acquire {{alignment = 8 : i64}} : !llvm.ptr -> i64
  %stop = llvm.icmp "ne" %quit, %zero : i64
  llvm.cond_br %stop, ^done, ^step
^step:
  llvm.call @{STEP}(%context, %tid, %n) : (!llvm.ptr, i64, i64) -> ()
  %next = llvm.add %seen, %one : i32
  llvm.br ^park(%next : i32)
^done:
  llvm.return
}}

llvm.func @{CYCLES}() -> i64 {{
  %t = func.call @cycles() : () -> i64
  llvm.return %t : i64
}}
"""
