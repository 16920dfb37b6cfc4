"""Memory of this host, or of the container that this runs in."""

import re
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes for processes."""

    total_bytes: int
    free_bytes: int


def read_host_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> HostMemory:
    """Return the kernel's figures, reduced to a container's limit."""
    text = meminfo.read_text(encoding="utf-8")
    total, free = _number("MemTotal:", text) * 1024, _number("MemAvailable:", text) * 1024
    limit, current, parts = (cgroup / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and limit.read_text().strip() != "max":  # a container's
        most, used = int(limit.read_text()), int(current.read_text())
        if parts.exists():  # cached files, such as weights, make room for processes
            used -= _number("inactive_file", parts.read_text(encoding="utf-8"))
        total, free = min(total, most), min(free, most - used)
    return HostMemory(total_bytes=total, free_bytes=free)


def _number(name: str, text: str) -> int:
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0
