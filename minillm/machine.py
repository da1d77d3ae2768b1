"""This machine: its processor and its memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def memory() -> tuple[int, int]:
    """Bytes of memory that can be taken now, and in all: of the machine, or of this process's container."""
    total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = int(_fields(meminfo)["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available, total


def processor() -> str:
    """The processor's name, as far as the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    name = _fields(cpuinfo).get("model name", "") if cpuinfo.exists() else ""
    return name.strip() or platform.processor() or platform.machine()


def _fields(path: Path) -> dict[str, str]:
    """The lines ``name: value`` of a file."""
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name.strip(): value for name, value in pairs}
