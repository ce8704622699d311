"""The memory that the native step driver and its caller share, as ctypes structures. Standard library only.

``driver_kernel`` takes the offsets from here when it writes the driver, ``launch`` fills the structures in.
"""

from __future__ import annotations

import ctypes

DRIVER_OBJECT = "driver.o"
RUN, STEP, WORKER, CYCLES = "adaptc_run", "adaptc_step", "adaptc_worker", "adaptc_cycles"
"""Functions that the driver's object exports."""

_LINE = 64  # bytes of a cache line: what different threads write lies on different lines


class Command(ctypes.Structure):
    """One kernel call: the kernel's address and its array of buffer pointers."""

    _fields_ = [("kernel", ctypes.c_void_p), ("buffers", ctypes.c_void_p)]


class Word(ctypes.Structure):
    """A counter that threads wait on: ``generation`` grows by one at each event, ``sleepers`` are in a futex wait."""

    _fields_ = [("generation", ctypes.c_uint32), ("sleepers", ctypes.c_uint32), ("_pad", ctypes.c_uint8 * (_LINE - 8))]


class Context(ctypes.Structure):
    """What a step reads and how its threads meet.

    commands, count  the calls to carry out: a barrier follows each
    symbols          values of the plan's symbols, int64 each
    times            null, or count + 1 cycle counts: before the first call, and after each call's barrier
    spin             cycles that a waiting thread spins and gives way before it sleeps
    quit             not 0: workers return when woken
    arrived          threads that have reached the current barrier
    passed           one event a barrier
    started          one event a step
    """

    _fields_ = [
        ("commands", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("symbols", ctypes.c_void_p),
        ("times", ctypes.c_void_p),
        ("spin", ctypes.c_int64),
        ("quit", ctypes.c_int64),
        ("_pad0", ctypes.c_uint8 * (_LINE - 48)),
        ("arrived", ctypes.c_uint32),
        ("_pad1", ctypes.c_uint8 * (_LINE - 4)),
        ("passed", Word),
        ("started", Word),
    ]
