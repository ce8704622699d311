"""The cpu backend's compile-time side: operators → kernels → objects."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import pkgutil
import queue
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any
from collections.abc import Callable, Iterable, Mapping, Sequence

from adaptc import packages
from adaptc.backends.cpu import kernels as kernel_modules
from adaptc.backends.cpu.context import DRIVER_OBJECT, RUN
from adaptc.backends.cpu.driver_kernel import driver_text
from adaptc.backends.cpu.elf import read_object
from adaptc.backends.cpu.kernels.base import Family
from adaptc.backends.cpu.levels import LEVELS, NATIVE, level_of, native_level
from adaptc.backends.cpu.toolchain import check_host, toolchain_version
from adaptc.backends.cpu.worker import Worker
from adaptc.content_cache import ContentCache, cache_key
from adaptc.errors import AdaptcError, one_of
from adaptc.formats import WeightFormat
from adaptc.protocol import KernelSpec, OpSpec, Probe, Selection

_DIGITS = 16  # of a symbol's hash


def _rows(table: str) -> Mapping[str, Any]:
    """The union of the kernel modules' and packages' tables of that name (FAMILIES or SELECT), keys unique."""
    return _tables(table)[0]


@functools.cache
def _tables(table: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(that union, the package by key of what isn't our own)."""
    union = _own(table)
    theirs = packages.added(packages.CPU_KERNELS, table, union, _PROBLEMS[table])
    union |= {name: _blaming(a.extension, table, name, a.value) for name, a in theirs.items()}
    return union, {name: a.extension.package for name, a in theirs.items()}


def _own(table: str) -> dict[str, Any]:
    """The kernel modules' tables of that name (NEEDS too: operator → what kernels for it take), keys unique."""
    union: dict[str, Any] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(kernel_modules.__path__)):
        rows = getattr(importlib.import_module(f"{kernel_modules.__name__}.{module}"), table, {})
        assert not union.keys() & rows.keys(), f"{module}.{table} repeats {sorted(union.keys() & rows.keys())}"
        union.update(rows)
    return union


_PROBLEMS: Mapping[str, Callable[[Any], str]] = {
    "FAMILIES": lambda value: "" if isinstance(value, Family) else f"{value!r} is no adaptc.backends.cpu.kernels.base.Family.",
    "SELECT": lambda value: "" if callable(value) else f"{value!r} is no function from an OpSpec to a Selection or None.",
}
"""What is wrong with an entry of a package's table."""


def _blaming(extension: packages.Extension, table: str, name: str, value: Any) -> Any:
    if table == "SELECT":
        return packages.blaming(extension, f"SELECT of {name!r}", value)
    functions = {part: getattr(value, part) for part in ("emit", "signature")}
    return replace(value, **{part: packages.blaming(extension, f"{part} of the kernel family {name!r}", function)
                             for part, function in functions.items()})


def _family(name: str) -> Family:
    families = _rows("FAMILIES")
    if name not in families:
        raise one_of("kernel family", name, sorted(families))
    return families[name]


@functools.cache
def _symbol(kernel: KernelSpec) -> str:
    digest = hashlib.sha256()
    for level in LEVELS.values():  # what is the same at one level may differ at another
        digest.update(_family(kernel.family).emit(dict(kernel.params), "kernel", level).encode())
    return f"{kernel.family}_{digest.hexdigest()[:_DIGITS]}"


@dataclass(frozen=True)
class CpuCodegen:
    """See ``adaptc.protocol.Codegen``. Every kernel is an object of its own, named after its symbol, and its symbol is
    derived from its texts at all levels: the same kernel has one name, and one level's bytes are the same, in every
    artifact and on every host."""

    name: str = "cpu"
    symbols: tuple[str, ...] = ("T", "R", "S")
    tile: str = "r8k4"

    def requirements(self, level: str) -> Mapping[str, str]:
        return {"architecture": level_of(level).machine, "level": level}

    def select(self, spec: OpSpec) -> Selection | None:
        choose = _rows("SELECT").get(spec.op)
        return choose(spec) if choose else None

    def needs(self, operator: str) -> str:
        return _own("NEEDS").get(operator, "")

    def choices(self, family: str) -> Mapping[str, Sequence[int]]:
        return _family(family).choices

    def symbol(self, kernel: KernelSpec) -> str:
        return _symbol(kernel)

    def signature(self, kernel: KernelSpec) -> tuple[str, ...]:
        return _family(kernel.family).signature(dict(kernel.params))

    def probes(self, level: str) -> Mapping[str, Probe]:
        from adaptc.backends.cpu.kernels.probe import probes

        return probes(level_of(level))

    def level(self, name: str) -> str:
        """The full name of a level: features sorted, ``native`` resolved to the highest that this machine runs."""
        return (native_level() if name == NATIVE else level_of(name)).name

    def check_level(self, level: str) -> None:
        """OptionError when this host can't generate code for ``level``."""
        check_host(level_of(level))

    def packages(self, operators: Iterable[str], kernels: Iterable[KernelSpec]) -> frozenset[str]:
        """Installed packages that chose kernels for these operators, or whose kernels these are."""
        owners = [_tables("SELECT")[1].get(op) for op in operators]
        owners += [_tables("FAMILIES")[1].get(kernel.family) for kernel in kernels]
        return frozenset(filter(None, owners))

    def object_of(self, kernel: KernelSpec) -> str:
        return f"{_symbol(kernel)}.o"

    def compile(
        self,
        kernels: Sequence[KernelSpec],
        level: str,
        *,
        workers: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Mapping[str, bytes]:
        """Objects by file name, sorted: one a kernel and the step driver's. ``progress(done, total)`` is called as
        kernels are done. Raises AdaptcError naming the kernel that can't be compiled."""
        target = level_of(level)
        texts = {(DRIVER_OBJECT, RUN): driver_text(target.machine)}
        for kernel in kernels:
            symbol = _symbol(kernel)
            texts[self.object_of(kernel), symbol] = _family(kernel.family).emit(dict(kernel.params), symbol, target)
        return compile_texts(texts, level, workers=workers, progress=progress)

    def packed_bytes(self, format: WeightFormat, shape: tuple[int, int]) -> int:
        from adaptc.backends.cpu.packing import packed_bytes

        return packed_bytes(format, shape)

    def pack(self, format: WeightFormat, shape: tuple[int, int], codes: Mapping[str, Any]) -> bytes:
        from adaptc.backends.cpu.packing import pack

        return pack(format, shape, codes)

    def unpack(self, format: WeightFormat, shape: tuple[int, int], data: Any) -> Mapping[str, Any]:
        from adaptc.backends.cpu.packing import unpack

        return unpack(format, shape, data)


def compile_texts(
    texts: Mapping[tuple[str, str], str],
    level: str,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
    cache: ContentCache | None = None,
) -> dict[str, bytes]:
    """Objects by file name from MLIR texts by (file name, symbol that the object must export).

    What the cache holds is taken from there; the rest is compiled by up to ``workers`` processes. Names, order and
    bytes of the result don't depend on either.
    """
    cache = cache or ContentCache.named("kernels")
    level = level_of(level).name
    version = toolchain_version()
    keys = {name: cache_key(text, level, version) for name, text in texts.items()}
    objects = {name: cache.get(key) for name, key in keys.items()}
    # longest first, so that no worker is left alone with a big kernel at the end
    missing = sorted((n for n, data in objects.items() if data is None), key=lambda n: (-len(texts[n]), n))
    report = progress or (lambda done, total: None)
    done = len(texts) - len(missing)
    report(done, len(texts))
    made = _compile_all({n: texts[n] for n in missing}, level, max(1, min(workers, len(missing))))
    with contextlib.closing(made):
        for name, data in made:
            objects[name] = data
            cache.put(keys[name], data)
            done += 1
            report(done, len(texts))
    if missing:
        cache.trim()
    return {file: objects[file, symbol] for file, symbol in sorted(objects)}


def _compile_all(texts: Mapping[tuple[str, str], str], level: str, workers: int):
    """Yields (name, object) as they are done. Whatever ends the iteration, Ctrl-C included, ends the workers."""
    if not texts:
        return
    pool: list[Worker] = []
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def job(name: tuple[str, str]) -> bytes:
        worker = idle.get()
        try:
            data = worker.compile(name[1], texts[name], level)
        finally:
            idle.put(worker)
        if name[1] not in read_object(data, name[0]).exports():
            raise AdaptcError(f"kernel {name[1]}: its text defines no public function of that name.")
        return data

    threads = ThreadPoolExecutor(workers)
    try:
        for _ in range(workers):
            pool.append(Worker())
            idle.put(pool[-1])
        futures = {threads.submit(job, name): name for name in texts}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for worker in pool:
            worker.stop()
        threads.shutdown(cancel_futures=True)


CODEGEN = CpuCodegen()
