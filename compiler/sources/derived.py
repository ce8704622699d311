"""What has been made of a model's description before: its program, its tokenizer, the names of its tensors.

All of it follows from the description (the files but for the values of weights), from code and from versions; these
are its key in a cache. Nothing is kept of what follows from more than that: modules in memory, code that is fetched
from elsewhere, and whatever a process makes that had imported transformers before, since classes may have been
registered or patched there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from adaptc.content_cache import ContentCache, cache_key

CODE = ("adaptc.artifact_format", "adaptc.blocks", "adaptc.capture", "adaptc.content_cache", "adaptc.errors",
        "adaptc.formats", "adaptc.ir", "adaptc.models", "adaptc.ops", "adaptc.packages", "adaptc.plan", "adaptc.protocol",
        "adaptc.sources")
"""Modules and packages of ours that capture runs."""

PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "torch", "torch-mlir", "transformers")
"""Packages of others whose versions count."""

EXTENSIONS = ("adaptc.operators", "adaptc.capture")
"""Groups of entry points by which other packages take part."""

_REVISION = "1"
"""Counts the changes of how entries are written."""


class Derived:
    """Entries of one description, by what they are: "program", "text", … Without a key there are none."""

    def __init__(self, cache: ContentCache, key: str | None):
        self._cache, self._key = cache, key

    @staticmethod
    def of(description: Iterable[str | bytes | memoryview] | None) -> "Derived":
        """Those of the model that ``description`` tells all about; none where it is None."""
        if description is None or classes_may_be_changed():
            return Derived(ContentCache(None), None)
        return Derived(ContentCache.named("capture"), cache_key(*_code(), *description))

    def get(self, what: str) -> bytes | None:
        return None if self._key is None else self._cache.get(cache_key(self._key, what))

    def put(self, what: str, content: bytes) -> None:
        if self._key is not None:
            self._cache.put(cache_key(self._key, what), content)
            self._cache.trim()


def classes_may_be_changed() -> bool:
    """Whether something in this process may have registered or patched classes that capture runs."""
    return "transformers" in sys.modules


def _code() -> Iterator[str | bytes]:
    yield from (_REVISION, f"Python {sys.version_info[0]}.{sys.version_info[1]}")
    yield from (f"{name} {_version(name)}" for name in PACKAGES)
    for name in CODE:
        yield from source_files(name)
    points = [point for group in EXTENSIONS for point in entry_points(group=group)]
    for point in sorted(points, key=lambda point: (point.group, point.name, point.value)):
        yield from (point.group, point.name, point.value, point.dist.version if point.dist else "")
        yield from source_files(point.value.partition(":")[0].partition(".")[0])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def source_files(name: str) -> Iterator[str | bytes]:
    """Names and contents of the Python files of a module or package, found without importing it."""
    spec = find_spec(name)
    for place in (spec.submodule_search_locations or [spec.origin]) if spec else ():
        yield from python_files(Path(place))


def python_files(place: Path) -> Iterator[str | bytes]:
    """Names and contents of the Python files at or below ``place``."""
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        yield from (path.relative_to(place).as_posix(), path.read_bytes())
