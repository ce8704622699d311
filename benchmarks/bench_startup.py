"""Compile times with and without caches, time from an artifact to its first token, and memory while serving.

    python benchmarks/bench_startup.py MODEL [--rounds 3] [--activations int8] [--threads 2]

Every figure comes from fresh processes; the best of ``--rounds`` is shown, with what its CPUs were busy for (user and
system), which a machine with other work distorts less than the wall clock. Compiles use a cache folder of their own:
"cold" starts with an empty one, "cached" finds what the one before left. Files are in the page cache. First tokens are
of a prompt of 32 token ids, so that the tokenizer, which loads when text is asked for, has no part in them; what it
takes is shown by itself. Memory is the peak of a process that serves prompts of 256 tokens and 64 tokens after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MB = 1e6
PROMPT, GENERATED = 256, 64
FIRST_PROMPT = 32

FIRST = """
import json, sys, time
start, cpu = time.perf_counter(), time.process_time()
import adaptc
session = adaptc.load(sys.argv[1], threads=int(sys.argv[2]))
loaded, loaded_cpu = time.perf_counter() - start, time.process_time() - cpu
session.engine.add(list(range(100, 100 + {first})), max_tokens=1)
while not session.engine.step():
    pass
first, first_cpu = time.perf_counter() - start, time.process_time() - cpu
session.tokenizer
text, text_cpu = time.perf_counter() - start - first, time.process_time() - cpu - first_cpu
print(json.dumps(dict(load=(loaded, loaded_cpu), first=(first, first_cpu), tokenizer=(text, text_cpu))))
"""

SERVE = """
import json, sys
import adaptc
session = adaptc.load(sys.argv[1], threads=int(sys.argv[2]))
requests = int(sys.argv[3])
for i in range(requests):
    session.engine.add([(7 * i + 13 * j) % 1000 + 100 for j in range({prompt})], max_tokens={generated})
while session.engine.active:
    session.engine.step()
plan = session.plan
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
kilobytes = {{name: int(status[name].split()[0]) for name in ("VmHWM", "RssAnon", "RssFile")}}
tokens = -(-({prompt} + {generated}) // plan.page_size) * plan.page_size
rows = lambda state: min(tokens, state.window + plan.max_step_tokens) if state.window else tokens
cache = sum(state.token_bytes() * requests * rows(state) for state in plan.states)
weights = session.manifest["files"]["weights.safetensors"]["size"]
print(json.dumps(dict(peak=kilobytes["VmHWM"] * 1024, anonymous=kilobytes["RssAnon"] * 1024,
                      files=kilobytes["RssFile"] * 1024, weights=weights, cache=cache)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "model.adapt"
        for name, seconds in compiles(arguments, artifact, Path(folder)).items():
            print(f"compile, {name:26} {shown(seconds)}")
        for name, seconds in first_tokens(arguments, artifact).items():
            print(f"{name:35} {shown(seconds)}")
        for requests in (1, 8):
            found = child(SERVE.format(prompt=PROMPT, generated=GENERATED), artifact, arguments.threads, requests)
            rest = found["peak"] - found["weights"] - found["cache"]
            what = f"peak memory, requests: {requests}"
            print(f"{what:35} {found['peak'] / MB:7.0f} MB = weights {found['weights'] / MB:.0f} + cache "
                  f"{found['cache'] / MB:.0f} + {rest / MB:.0f} (at the end {found['anonymous'] / MB:.0f} anonymous, "
                  f"{found['files'] / MB:.0f} of files)")


def shown(seconds: tuple[float, float]) -> str:
    return f"{seconds[0]:7.2f} s, CPU {seconds[1]:6.2f} s"


def compiles(arguments, artifact: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds of the whole command, cold and cached."""
    found: dict[str, list] = {"cold": [], "cached": []}
    for number in range(arguments.rounds):
        environment = {**os.environ, "ADAPTC_CACHE": str(folder / f"cache{number}")}
        for name, seconds in found.items():
            command = [sys.executable, "-m", "adaptc.cli", "compile", arguments.model, "-o", artifact, "--force",
                       "--activations", arguments.activations]
            before, start = os.times(), time.perf_counter()
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            wall, after = time.perf_counter() - start, os.times()
            cpu = after.children_user - before.children_user + after.children_system - before.children_system
            seconds.append((wall, cpu))
    return {name: min(seconds) for name, seconds in found.items()}


def first_tokens(arguments, artifact: Path) -> dict[str, tuple[float, float]]:
    rounds = [child(FIRST.format(first=FIRST_PROMPT), artifact, arguments.threads) for _ in range(arguments.rounds + 1)]
    names = {"load": "load", "first": f"load to first token, {FIRST_PROMPT} ids", "tokenizer": "tokenizer"}
    return {shown: min(tuple(one[name]) for one in rounds[1:]) for name, shown in names.items()}


def child(code: str, *arguments) -> dict:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
