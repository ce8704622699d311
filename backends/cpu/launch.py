"""The cpu backend's run-time side: kernels mapped from objects, weights used in place, steps run on all threads."""

from __future__ import annotations

import ctypes
import math
import platform
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from adaptc.backends.cpu.context import CYCLES, RUN, WORKER, Command, Context
from adaptc.backends.cpu.elf import MACHINES, Image
from adaptc.backends.cpu.levels import host_flags, level_of, rank
from adaptc.backends.cpu.memory import Region
from adaptc.errors import ArtifactError, OptionError, WrongMachineError, one_of
from adaptc.plan import ALIGNMENT, STATE_KINDS, Buffer, Plan

_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_Run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_Worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_Cycles = ctypes.CFUNCTYPE(ctypes.c_int64)

_DTYPES = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i64": np.int64, "i32": np.int32,
    "i8": np.int8, "u8": np.uint8, "i1": np.bool_,
}  # fmt: skip
_SPIN_SECONDS = 20e-6
"""A barrier between running threads takes 0.2 µs; a futex sleep and wake-up about 50 µs."""
_CALIBRATION_SECONDS = 2e-3


class Library:
    """Objects loaded into this process, for calling one kernel by itself.

    ``objects`` maps file names to contents. Raises ArtifactError for malformed objects and those of another machine.
    """

    def __init__(self, objects: Mapping[str, bytes | memoryview]):
        self.image = Image(objects)
        machine = platform.machine()
        for other in self.image.machines.keys() - {MACHINES.get(machine)}:
            raise WrongMachineError(f"object {self.image.machines[other]} is not for {machine} CPUs.")

    def address(self, symbol: str) -> int:
        """Address of a kernel; ArtifactError when no object defines it."""
        return self.image.address(symbol)

    def call(self, symbol: str, arrays: Sequence[np.ndarray], symbols: Sequence[int], tid: int = 0, n: int = 1) -> None:
        """Runs thread ``tid``'s share of ``n`` of a kernel over C-contiguous ``arrays``, in place.

        Kernels may assume that buffers start at multiples of ``ALIGNMENT`` bytes, as a plan's do.
        """
        for index, array in enumerate(arrays):
            if not array.flags.c_contiguous:
                raise OptionError(f"buffer {index} of kernel {symbol} is not C-contiguous.", hint="Pass a copy.")
        buffers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        values = (ctypes.c_int64 * len(symbols))(*symbols)
        _Kernel(self.address(symbol))(ctypes.addressof(buffers), ctypes.addressof(values), tid, n)


def _seconds_per_cycle(library: Library) -> float:
    """Measured once a load: the cycle counter's rate isn't readable everywhere."""
    cycles = _Cycles(library.address(CYCLES))
    start, first = time.perf_counter(), cycles()
    while (elapsed := time.perf_counter() - start) < _CALIBRATION_SECONDS:
        pass
    return elapsed / max(1, cycles() - first)


class CpuExecutable:
    """A plan made runnable: see ``adaptc.protocol.Executable``. One step at a time; threads wait their turn."""

    def __init__(self, plan: Plan, objects, weights, *, threads: int, pages: Mapping[str, int]):
        if threads < 1:
            raise OptionError(f"the number of threads must be at least 1, got {threads}.")
        self._plan = plan
        self._symbols = tuple(symbol.name for symbol in plan.symbols)
        self._maxima = {symbol.name: symbol.max for symbol in plan.symbols}
        self._library = Library(objects)
        self._buffers = {buffer.handle: buffer for buffer in plan.buffers}
        self._memory = _Memory(plan, weights, pages)
        self._threads = threads
        self._rate = _seconds_per_cycle(self._library)
        self._lock = threading.Lock()
        self._prepare()
        self._start()

    # --- preparation ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        kernels = {kernel.symbol: kernel for kernel in self._plan.kernels}
        pointers: list[list[int]] = []
        addresses: list[int] = []
        self._owners: list[int] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        for segment in self._plan.segments:
            if segment.kind != "native":
                raise ArtifactError(f"the plan has a {segment.kind!r} segment; the cpu backend runs native ones only.")
            for operator in segment.operators:
                self._starts[operator.id] = len(self._owners)
                for call in operator.calls:
                    where = f"operator {operator.id} ({operator.op})"
                    kernel = kernels.get(call.kernel)
                    if kernel is None or len(kernel.signature) != len(call.buffers):
                        raise ArtifactError(
                            f"plan.json: {where} calls {call.kernel!r} in a way its kernel isn't declared."
                        )
                    addresses.append(self._library.address(call.kernel))
                    pointers.append([self._memory.address(handle, where) for handle in call.buffers])
                    self._owners.append(operator.id)
                self._ends[operator.id] = len(self._owners)
        self._pointers = [(ctypes.c_void_p * max(1, len(row)))(*row) for row in pointers]
        self._commands = (Command * max(1, len(addresses)))(
            *(Command(a, ctypes.addressof(p)) for a, p in zip(addresses, self._pointers))
        )
        self._values = (ctypes.c_int64 * max(1, len(self._symbols)))()
        self._stamps = (ctypes.c_int64 * (len(addresses) + 1))()
        # own pages: the words that threads wait on must lie on lines of their own
        self._region = Region(ctypes.sizeof(Context))
        self._context = context = Context.from_address(self._region.address)
        context.commands = ctypes.addressof(self._commands)
        context.symbols = ctypes.addressof(self._values)
        context.spin = int(_SPIN_SECONDS / self._rate)

    def _start(self) -> None:
        self._run = _Run(self._library.address(RUN))
        work = _Worker(self._library.address(WORKER))
        # all that the threads use, but not self: an executable that is dropped must be collected, then finalized
        kept = (
            self._library, self._memory, self._region, self._pointers, self._commands, self._values, self._stamps,
        )  # fmt: skip
        workers = [
            threading.Thread(
                target=_work,
                args=(work, self._region.address, tid, self._threads, kept),
                name=f"adaptc-{tid}",
                daemon=True,
            )
            for tid in range(1, self._threads)
        ]
        started: list[threading.Thread] = []
        self._finalizer = weakref.finalize(self, _stop, self._region, self._run, started, self._lock, kept)
        for worker in workers:
            try:
                worker.start()
            except RuntimeError as error:
                self.close()
                raise OptionError(
                    f"thread {worker.name} of {self._threads} can't be started: {error}.", hint="Ask for fewer threads."
                ) from error
            started.append(worker)

    # --- the protocol -----------------------------------------------------------------------------------------------

    def inputs(self, role: str) -> np.ndarray:
        """Writable array over an input buffer, at its maximum shape."""
        return self._role(role, self._plan.inputs, "input")

    def outputs(self, role: str) -> np.ndarray:
        """Array over an output buffer, at its maximum shape."""
        return self._role(role, self._plan.outputs, "output")

    def _role(self, role: str, roles: Mapping[str, str], kind: str) -> np.ndarray:
        if role not in roles:
            raise one_of(kind, role, roles)
        return self._array(roles[role], self._maxima)

    def read(self, handle: str, symbols: Mapping[str, int]) -> np.ndarray:
        """A copy of a buffer's content with these symbol values. Packed weights come as uint8 [bytes], bfloat16 as
        uint16; a state as uint8 [num_pages, page_bytes]."""
        if handle not in self._buffers:
            raise one_of("buffer", handle, self._buffers)
        if self._buffers[handle].kind == "state":
            return self.state(self._buffers[handle].source).copy()
        return self._array(handle, self._checked(symbols)).copy()

    def state(self, name: str) -> np.ndarray:
        """uint8 [num_pages, page_bytes] over a state's pool of pages, or of slots."""
        return self._memory.pool(name)

    def run(self, symbols: Mapping[str, int], *, stop_after: int | None = None, only: Sequence[int] | None = None,
            times: bool = False):  # fmt: skip
        """One step; see the protocol. Raises OptionError for symbol values out of range or an unknown operator."""
        with self._lock:
            if not self._finalizer.alive:
                raise OptionError("this executable is closed.", hint="Load the artifact again.")
            for index, name in enumerate(self._symbols):
                value = symbols.get(name, -1)
                if not 0 <= value <= self._maxima[name]:
                    self._checked(symbols)
                self._values[index] = value
            for operator in (*(() if stop_after is None else (stop_after,)), *(only or ())):
                if operator not in self._ends:
                    raise one_of("operator", operator, self._ends)
            if only is None:
                owners = self._owners[: self._ends.get(stop_after, len(self._owners))]
                commands, stamps = self._commands, self._stamps
            else:
                chosen = [i for operator in only for i in range(self._starts[operator], self._ends[operator])]
                owners = [self._owners[i] for i in chosen]
                commands = (Command * max(1, len(chosen)))(*(self._commands[i] for i in chosen))
                stamps = (ctypes.c_int64 * (len(chosen) + 1))()
            self._context.commands = ctypes.addressof(commands)
            self._context.count = len(owners)
            self._context.times = ctypes.addressof(stamps) if times else None
            try:
                if owners:
                    self._run(self._region.address, self._threads)
            finally:  # closing runs once more, without commands: nothing of this step may be used then
                self._context.commands = ctypes.addressof(self._commands)
                self._context.times = None
            if not times:
                return None
            ran = [o for o, end in self._ends.items() if end <= len(owners)] if only is None else only
            return self._spent(dict.fromkeys(ran, 0), owners, stamps)

    def close(self) -> None:
        """Stops the threads. Arrays that were handed out stay valid."""
        self._finalizer()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _spent(self, spent: dict[int, float], owners: Sequence[int], stamps) -> dict[int, float]:
        """Seconds by operator, of commands that have just run."""
        cycles = np.diff(np.frombuffer(stamps, np.int64, len(owners) + 1)).tolist()
        for owner, taken in zip(owners, cycles):
            spent[owner] += taken
        return {operator: total * self._rate for operator, total in spent.items()}

    def _checked(self, symbols: Mapping[str, int]) -> Mapping[str, int]:
        for name, most in self._maxima.items():
            if not 0 <= symbols.get(name, -1) <= most:
                raise OptionError(f"symbol {name} must be between 0 and {most}, got {symbols.get(name)}.")
        return symbols

    def _array(self, handle: str, symbols: Mapping[str, int]) -> np.ndarray:
        buffer = self._buffers[handle]
        raw = self._memory.bytes_of(handle)
        shape = tuple(symbols[d] if isinstance(d, str) else d for d in buffer.shape)
        dtype = np.dtype(_DTYPES[buffer.dtype])
        if buffer.kind == "weight" and math.prod(shape) * dtype.itemsize != buffer.bytes:
            return raw
        return raw[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _work(work, address: int, tid: int, n: int, kept) -> None:
    """A worker thread: one foreign call, without Python's lock, until the executable is closed."""
    work(address, tid, n)


def _stop(region: Region, run, workers: list[threading.Thread], lock: threading.Lock, kept) -> None:
    """Wakes the workers with the quit flag set and waits for their end; after a step in progress."""
    with lock:
        context = Context.from_address(region.address)
        context.quit = 1
        context.count = 0
        run(region.address, 2)  # no commands: only wakes who is parked
        for worker in workers:
            worker.join()


class _Memory:
    """Where every buffer of a plan lies: arena, inputs and outputs in one region, a pool a state, weights as given."""

    def __init__(self, plan: Plan, weights: Mapping[str, memoryview], pages: Mapping[str, int]):
        self._views: dict[str, np.ndarray] = {}
        self._pools: dict[str, np.ndarray] = {}
        maxima = {symbol.name: symbol.max for symbol in plan.symbols}
        groups = {state: group.name for group in plan.groups for state in group.states}
        for state in plan.states:
            count = pages.get(groups.get(state.name, ""), 0)
            if count < 1:
                raise OptionError(f"state {state.name}: its cache group {state.group!r} needs at least one page.")
            known = state.dtype in _DTYPES and state.kind in STATE_KINDS
            if not known or plan.page_size < 1 or state.rate < 1 or any(p.heads < 1 or p.width < 1 for p in state.parts):
                raise ArtifactError(f"plan.json: state {state.name} has a layout that makes no sense: {state}.")
            size = state.page_bytes(plan.page_size)
            self._pools[state.name] = Region(count * size).array().reshape(count, size)

        if plan.arena_bytes < 0:
            raise ArtifactError(f"plan.json: the arena has {plan.arena_bytes} bytes.")
        places = {}
        end = _round_up(plan.arena_bytes)
        for buffer in plan.buffers:
            _check(buffer, maxima)
            if buffer.kind == "arena":
                if buffer.offset < 0 or buffer.offset % ALIGNMENT or buffer.offset + buffer.bytes > plan.arena_bytes:
                    raise ArtifactError(f"plan.json: buffer {buffer.handle} lies outside the arena or is not aligned.")
                places[buffer.handle] = buffer.offset
            elif buffer.kind in ("input", "output", "pages"):
                places[buffer.handle] = end
                end = _round_up(end + buffer.bytes)
        shared = Region(end).array()
        for buffer in plan.buffers:
            if buffer.kind == "weight":
                self._views[buffer.handle] = _weight(buffer, weights)
            elif buffer.kind == "state":
                self._views[buffer.handle] = self.pool(buffer.source).reshape(-1)
            else:
                start = places[buffer.handle]
                self._views[buffer.handle] = shared[start : start + buffer.bytes]

    def pool(self, name: str) -> np.ndarray:
        if name not in self._pools:
            raise one_of("state", name, self._pools)
        return self._pools[name]

    def address(self, handle: str, where: str) -> int:
        if handle not in self._views:
            raise ArtifactError(f"plan.json: {where} uses buffer {handle!r}, which the plan doesn't declare.")
        return self._views[handle].ctypes.data

    def bytes_of(self, handle: str) -> np.ndarray:
        return self._views[handle]


_KINDS = ("input", "output", "arena", "weight", "state", "pages")


def _check(buffer: Buffer, maxima: Mapping[str, int]) -> None:
    unknown = [d for d in buffer.shape if isinstance(d, str) and d not in maxima]
    if buffer.kind not in _KINDS or buffer.dtype not in _DTYPES or unknown:
        raise ArtifactError(
            f"plan.json: buffer {buffer.handle} has kind {buffer.kind!r}, dtype {buffer.dtype!r}, shape {buffer.shape}."
        )
    sizes = [maxima[d] if isinstance(d, str) else d for d in buffer.shape]
    need = math.prod(sizes) * np.dtype(_DTYPES[buffer.dtype]).itemsize
    if (
        min(sizes, default=0) < 0
        or buffer.bytes < 0
        or (buffer.kind not in ("weight", "state") and buffer.bytes < need)
    ):
        raise ArtifactError(
            f"plan.json: buffer {buffer.handle} of shape {buffer.shape} needs {need} bytes, not {buffer.bytes}."
        )


def _weight(buffer: Buffer, weights: Mapping[str, memoryview]) -> np.ndarray:
    if buffer.source not in weights:
        raise ArtifactError(f"weight {buffer.source!r} is missing from the artifact.", hint="Compile the model again.")
    view = np.frombuffer(weights[buffer.source], np.uint8)
    if len(view) < buffer.bytes:
        raise ArtifactError(f"weight {buffer.source!r} has {len(view)} bytes, but the plan needs {buffer.bytes}.")
    if len(view) and view.ctypes.data % ALIGNMENT:
        raise ArtifactError(f"weight {buffer.source!r} doesn't lie at a multiple of {ALIGNMENT} bytes.")
    return view[: buffer.bytes]


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class CpuLauncher:
    """See ``adaptc.protocol.Launcher``."""

    name = "cpu"

    def choose_level(self, plan: Plan, wanted: str | None = None) -> str:
        """See the protocol. Of the levels that this machine runs, the best base, then the one with most features."""
        try:
            levels = {name: level_of(name) for name in plan.levels}
        except OptionError as error:
            raise ArtifactError(f"plan.json: {error}", hint="Install a newer adaptc.") from error
        if wanted is not None and wanted not in levels:
            raise one_of("level of this artifact", wanted, levels)
        machine, flags = platform.machine(), host_flags()
        asked = {wanted: levels[wanted]} if wanted is not None else levels
        missing = {name: level.missing(machine, flags) for name, level in asked.items()}
        running = [name for name in asked if not missing[name]]
        if running:
            return max(running, key=lambda name: rank(levels[name]))
        reasons = "; ".join(
            f"{name} is for {level.machine} CPUs, but this one is {machine}"
            if level.machine != machine
            else f"for {name} this CPU lacks {', '.join(missing[name])}"
            for name, level in asked.items()
        )
        if wanted is not None:
            raise OptionError(f"this machine can't run level {wanted}: {reasons}.", hint="Leave the level out.")
        raise WrongMachineError(
            f"this machine can't run the artifact: {reasons}.",
            hint="Run it on a newer machine, or compile it for a lower level.",
        )

    def load(
        self,
        plan: Plan,
        objects: Mapping[str, bytes],
        weights: Mapping[str, memoryview],
        *,
        threads: int,
        pages: Mapping[str, int],
    ) -> CpuExecutable:
        """Maps kernels and memory and starts ``threads`` - 1 workers. ``weights`` must stay mapped while it is used;
        each starts at a multiple of 64 bytes. Raises ArtifactError when plan, objects and weights don't fit."""
        return CpuExecutable(plan, objects, weights, threads=threads, pages=pages)

    def library(self, objects: Mapping[str, bytes]) -> Library:
        """The objects' kernels, to be called one at a time."""
        return Library(objects)


LAUNCHER = CpuLauncher()
