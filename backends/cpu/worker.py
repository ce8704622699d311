"""Compiling in processes of their own: MLIR holds Python's lock, and LLVM ends the process when it can't go on.

A worker is this module run as a program; it reads jobs from its standard input and writes objects to its standard
output, until the input ends. Unlike ``multiprocessing`` it never imports the caller's main module, so that a plain
script without an ``if __name__`` guard can compile.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile

from adaptc.errors import AdaptcError

_LENGTH = struct.Struct("<q")


def _send(stream, *fields: bytes) -> None:
    for field in fields:
        stream.write(_LENGTH.pack(len(field)) + field)
    stream.flush()


def _receive(stream) -> bytes:
    """One field; EOFError when the other side is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    data = stream.read(_LENGTH.unpack(head)[0])
    if len(data) < _LENGTH.unpack(head)[0]:
        raise EOFError
    return data


class Worker:
    """A compiler process. ``compile`` may be called again and again; ``stop`` ends it at once, from any thread."""

    def __init__(self):
        # LLVM's last words go to a file: a pipe that nobody reads could fill up
        self._stderr = tempfile.TemporaryFile()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C reaches the parent only, which then stops its workers
        )

    def compile(self, symbol: str, text: str, level: str) -> bytes:
        """As ``toolchain.compile_mlir``; errors name the kernel ``symbol``, also when LLVM brings the process down."""
        try:
            _send(self._process.stdin, text.encode(), level.encode())
            failed, payload = _receive(self._process.stdout), _receive(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait()
            self._stderr.seek(0)
            words = self._stderr.read()[-2000:].decode(errors="replace").strip()
            raise AdaptcError(f"kernel {symbol}: the compiler process ended with status {code}: {words}") from error
        if failed:
            raise AdaptcError(f"kernel {symbol}: {payload.decode()}")
        return payload

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._stderr.close()


def main() -> None:
    from adaptc.backends.cpu.toolchain import compile_mlir

    jobs, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not mix with results
    while True:
        try:
            text, level = _receive(jobs).decode(), _receive(jobs).decode()
        except EOFError:
            return
        try:
            _send(results, b"", compile_mlir(text, level))
        except AdaptcError as error:
            _send(results, b"failed", str(error).encode())


if __name__ == "__main__":
    main()
