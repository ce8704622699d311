"""Runs checks in a child process: native code that is wrong may also crash, and that must be a finding, not the end.

A kernel that reads beyond a page or a plan that names the wrong buffer can end the process. The child notes which
operator it is about to run in memory that both share, so the crash is reported under that operator's name.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from adaptc.errors import AdaptcError


class Crashed(Exception):
    """The child died. ``operator``: the id that it had noted last, or None; ``cause``: the signal's name."""

    def __init__(self, cause: str, operator: int | None):
        super().__init__(cause)
        self.cause, self.operator = cause, operator


class Failed(Exception):
    """The check ended in an error that no input should cause: what, and where it was raised."""


class Note:
    """One number in memory that a process shares with the children it forks."""

    def __init__(self):
        self._memory = mmap.mmap(-1, 8)
        self.clear()

    def put(self, number: int) -> None:
        self._memory[:8] = struct.pack("q", number)

    def clear(self) -> None:
        self.put(-1)

    def get(self) -> int | None:
        number = struct.unpack("q", self._memory[:8])[0]
        return number if number >= 0 else None


def guarded(check: Callable[[], Any], note: Note) -> Any:
    """``check()``'s result, computed in a forked child. Its AdaptcErrors are raised here; Failed for any other error,
    Crashed when it was killed by a signal."""
    note.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(check, write)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(child, 0)
    except BaseException:  # interrupted: the child must not go on alone
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    if os.WIFSIGNALED(status):
        raise Crashed(signal.Signals(os.WTERMSIG(status)).name, note.get())
    kind, value = pickle.loads(data)
    if kind is AdaptcError:
        refused, message, hint = value
        raise refused(message, hint=hint)
    if kind is Failed:
        raise Failed(value)
    return value


def _child(check: Callable[[], Any], write: int) -> None:
    """Computes, sends (kind of error or None, what it says or the result), and ends without any of the parent's
    clean-up."""
    code = 1
    faulthandler.disable()  # whoever started us may have it on; the parent says what happened
    try:
        try:
            answer = (None, check())
        except AdaptcError as error:  # in parts: with its hint as a keyword, it doesn't pickle
            answer = (AdaptcError, (type(error), error.message, error.hint))
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException as error:
            answer = (Failed, describe(error))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        code = 0
    finally:
        os._exit(code)


def describe(error: BaseException) -> str:
    """An error's kind, text and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}, line {frame.lineno})"
