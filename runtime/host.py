"""What this process may use of the machine: cores and memory. Reads /sys where there is one."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads of one core counted once, and no more than its CPU quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(path: str = "/sys/fs/cgroup/cpu.max") -> int | float:
    """CPUs that the control group allows, rounded up."""
    try:
        quota, period = Path(path).read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else math.ceil(int(quota) / int(period))


def memory_bytes(path: str = "/sys/fs/cgroup/memory.max") -> int:
    """Memory of the machine, or the control group's limit if that is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path(path).read_text().strip()
    except OSError:
        return machine
    return machine if limit == "max" else min(machine, int(limit))


def processor(path: str = "/proc/cpuinfo") -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
