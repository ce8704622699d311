"""docs/tour.md runs as it stands: its Python, its commands, and what it says that they print.

``adaptc`` runs in this process, which imports torch once; other commands run in a shell. In what a command is said to
print, ``…`` stands for anything; lines that are shown must come in this order.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from adaptc.cli import main

TOUR = Path(__file__).parents[1] / "docs" / "tour.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TOUR.read_text(), re.M | re.S)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """(command, lines it prints) of a console block."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def run(command: str) -> str:
    """What a command prints on both streams; a redirection is the shell's."""
    if not command.startswith("adaptc "):
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    words = shlex.split(command)
    words, file = (words[:-2], words[-1]) if ">" in words else (words, None)
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code in (0, 2), (command, done.output, done.exception)
    if file is None:
        return done.output
    Path(file).write_text(done.stdout)
    return done.stderr


def shown(output: str, lines: list[str], command: str) -> None:
    rest = [" ".join(line.split()) for line in output.splitlines()]
    for line in lines:
        wanted = re.compile(".*".join(re.escape(" ".join(part.split())) for part in line.split("…")))
        at = next((i for i, got in enumerate(rest) if wanted.fullmatch(got)), None)
        assert at is not None, f"$ {command}\nshould print\n{line}\nbut prints\n" + "\n".join(rest)
        rest = rest[at + 1 :]


def test_the_tour(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    ran = 0
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "docs/tour.md", "exec"), names)
        else:
            for command, lines in commands(block):
                shown(run(command), lines, command)
                ran += 1
    assert ran > 15


def test_the_check_finds_what_is_missing():
    with pytest.raises(AssertionError, match="should print"):
        shown("a b\nc", ["c", "a b"], "x")
    shown("a   b 12\nc", ["a b …", "c"], "x")
