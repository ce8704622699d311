"""Several processes that decode at once on cores that they have to share: what all of them together still give.

    python benchmarks/bench_sharing.py OUT.adapt [--processes 1,2,4] [--threads 2] [--new 64] [--rounds 3]

Every process loads the artifact with ``--threads`` threads, so with two processes on two cores each core has two
runnable threads. A barrier that only spins collapses there: a thread waits for one that the system has taken off its
core. The last column is the sum over processes against one process alone; 1.0 would be a fair share without loss.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

DECODE = """
import sys, time
import adaptc
session = adaptc.load(sys.argv[1], threads=int(sys.argv[2]), prefix_cache=False)
new = int(sys.argv[3])
def decode():
    engine, times = session.engine, []
    engine.add(list(range(100, 132)), max_tokens=new + 1)
    while engine.active:
        times += [time.perf_counter() for _ in engine.step()]
    return new / (times[-1] - times[0])
decode()
print("ready", flush=True)
sys.stdin.readline()
print(decode(), flush=True)
"""


def together(artifact: str, processes: int, threads: int, new: int) -> list[float]:
    """Tokens a second of each of so many processes, all decoding at once."""
    command = [sys.executable, "-c", DECODE, artifact, str(threads), str(new)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
               for _ in range(processes)]
    for one in running:
        assert one.stdout.readline() == "ready\n"
    for one in running:
        one.stdin.write("go\n")
        one.stdin.flush()
    rates = [float(one.stdout.readline()) for one in running]
    for one in running:
        one.wait()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--processes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sums: dict[int, list[float]] = {count: [] for count in args.processes}
    least: dict[int, list[float]] = {count: [] for count in args.processes}
    for _ in range(args.rounds):
        for count in args.processes:
            rates = together(args.artifact, count, args.threads, args.new)
            sums[count].append(sum(rates))
            least[count].append(min(rates))
    alone = statistics.median(sums[args.processes[0]])
    print("processes  tok/s of all  of the slowest  all against the first row")
    for count in args.processes:
        whole = statistics.median(sums[count])
        print(f"{count:9}  {whole:12.1f}  {statistics.median(least[count]):14.1f}  {whole / alone:10.2f}")


if __name__ == "__main__":
    main()
