"""What `adaptc inspect` says of published configurations, and what it takes to say it, as a table.

    python benchmarks/bench_inspect.py CONFIG.json...

Each configuration is inspected in a fresh process, one after the other. CPU seconds are the process's own; memory is its
peak. A configuration that is refused has its error instead.
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

COLUMNS = ("configuration", "parameters, B", "active, B", "cache of a token, bytes", "bodies", "wall, s", "CPU, s", "peak, GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for config in parser.parse_args().configs:
        print(f"| {' | '.join(measured(config))} |", flush=True)


def measured(config: Path) -> list[str]:
    command = [sys.executable, "-m", "adaptc.cli", "inspect", str(config), "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        out.seek(0)
        errors.seek(0)
        took = [f"{wall:.0f}", f"{usage.ru_utime + usage.ru_stime:.0f}", f"{usage.ru_maxrss * 1024 / 1e9:.2f}"]
        if status:
            return [config.stem, errors.read().strip().splitlines()[-1][:200], "", "", "", *took]
        found = json.load(out)
    other = found["other_parts"]
    sizes = [f"{found[key] / 1e9:,.1f}" + (f" ({(found[key] + other) / 1e9:,.1f} with its other parts)" if other else "")
             for key in ("parameters", "active")]
    return [config.stem, *sizes, f"{found['cache_token']:,}", str(len(found["bodies"])), *took]


if __name__ == "__main__":
    main()
