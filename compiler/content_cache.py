"""On-disk caches addressed by content. Losing one, or any file in one, costs only time.

``$ADAPTC_CACHE`` names the folder that holds them all, or is ``off``; by default it is ``$XDG_CACHE_HOME/adaptc``, else
``~/.cache/adaptc``. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

OFF = "off"
"""The value of ``$ADAPTC_CACHE`` that switches the caches off."""

LIMIT = 1 << 30
"""Bytes that one cache keeps: thousands of kernels, tens of large vocabularies."""

_DIGEST = hashlib.sha256().digest_size


def cache_key(*parts: str | bytes | memoryview) -> str:
    """A key that is the same exactly when all ``parts`` are, in order; text is its UTF-8."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class ContentCache:
    """Files named by key, each a SHA-256 over key and content, then the content. ``limit`` bytes at most are kept, the
    latest used ones. Without a folder it keeps nothing."""

    folder: Path | None
    limit: int = LIMIT

    @staticmethod
    def named(name: str) -> "ContentCache":
        """The cache of that name, e.g. "kernels", where the user's caches are."""
        root = os.environ.get("ADAPTC_CACHE")
        if root == OFF:
            return ContentCache(None)
        if not root:
            root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "adaptc")
        return ContentCache(Path(root) / name)

    def get(self, key: str) -> bytes | None:
        """The content stored under ``key``; None when there is none, or when it is damaged or unreadable."""
        if self.folder is None:
            return None
        path = _path(self.folder, key)
        try:
            raw = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        content = raw[_DIGEST:]
        return content if raw[:_DIGEST] == _digest(key, content) else None

    def put(self, key: str, content: bytes) -> None:
        """Stores ``content`` under ``key``, whole or not at all. A cache that can't be written stays as it is."""
        if self.folder is None:
            return
        path = _path(self.folder, key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_digest(key, content) + content)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise

    def trim(self) -> None:
        """Removes what was used longest ago until at most ``limit`` bytes are left. To be called after storing."""
        if self.folder is None:
            return
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*/*"):
                state = path.stat()
                found.append((state.st_mtime_ns, state.st_size, path))
        excess = sum(size for _, size, _ in found) - self.limit
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            excess -= size


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / key


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
