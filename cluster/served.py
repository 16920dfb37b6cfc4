"""The clusters of `pagewire serve` on this host: what their users' clients need."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.private_folder import LockedFile, is_locked, private_folder
from pagewire import Tls

KIND = "serve"  # of their files


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedCluster:
    """A cluster that serves."""

    pid: int  # of its `pagewire serve`
    address: str  # of its router when it became ready
    token: str = field(repr=False)  # that its router accepts; empty: it needs none
    tls: Tls | None  # of its router, as files on this host; None: it is in clear


@contextmanager
def published(cluster: ServedCluster) -> Iterator[None]:
    """Have processes of this user find a cluster while entered, as long as this one runs."""
    file = LockedFile(private_folder(), KIND, json.dumps(asdict(cluster)))
    try:
        yield
    finally:
        file.remove()


def served_clusters() -> list[ServedCluster]:
    """Return the clusters that are published."""
    found = []
    for path in sorted(private_folder().glob(f"{KIND}-*")):
        with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:  # it may just end
            if is_locked(file):
                values: dict[str, Any] = json.load(file)
                tls = values.pop("tls")
                found.append(ServedCluster(**values, tls=Tls(**tls) if tls else None))
    return found
