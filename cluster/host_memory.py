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
    total, free = _kilobytes("MemTotal", text) * 1024, _kilobytes("MemAvailable", text) * 1024
    limit, used = (cgroup / name for name in ("memory.max", "memory.current"))
    if limit.exists() and limit.read_text().strip() != "max":  # a container's
        most = int(limit.read_text())
        total, free = min(total, most), min(free, most - int(used.read_text()))
    return HostMemory(total_bytes=total, free_bytes=free)


def _kilobytes(name: str, text: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) if found else 0
