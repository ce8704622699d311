"""An on-disk cache of compiled kernels, addressed by content. Losing it, or any file in it, costs only time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def cache_key(*parts: str) -> str:
    """A key that is the same exactly when all ``parts`` are, in order."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def default_folder() -> Path:
    """``$ADAPTC_CACHE/kernels``, else ``$XDG_CACHE_HOME/adaptc/kernels``, else ``~/.cache/adaptc/kernels``."""
    if root := os.environ.get("ADAPTC_CACHE"):
        return Path(root) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "adaptc" / "kernels"


@dataclass(frozen=True)
class KernelCache:
    """Files named by key, each a SHA-256 over key and content, then the content."""

    folder: Path

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def get(self, key: str) -> bytes | None:
        """The content stored under ``key``; None when there is none, or when it is damaged or unreadable."""
        try:
            raw = self._path(key).read_bytes()
        except OSError:
            return None
        content = raw[_DIGEST:]
        return content if raw[:_DIGEST] == _digest(key, content) else None

    def put(self, key: str, content: bytes) -> None:
        """Stores ``content`` under ``key``, whole or not at all. A cache that can't be written stays as it is."""
        path = self._path(key)
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


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
