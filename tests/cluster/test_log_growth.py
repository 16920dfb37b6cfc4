"""The logs of a cluster that runs for long: Ray cuts them where two variables of a start say so."""

import json
import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from pagewire import Client
from tests.cluster.lasting_cluster import OPTIONS, Host

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("ray"),
]

NUM_REQUESTS = 300
MAX_BYTES, NUM_BACKUPS = 8000, 2


def test_logs_end_where_rays_variables_say() -> None:
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp") as folder:  # sockets: short paths
        host = Host(Path(folder))
        host.environment |= {
            "RAY_ROTATION_MAX_BYTES": str(MAX_BYTES),
            "RAY_ROTATION_BACKUP_COUNT": str(NUM_BACKUPS),
        }
        options = OPTIONS | {"model": str(host.folder / "model"), "log_level": "info"}
        host.config.write_text(json.dumps(options))
        try:
            code, output, errors = host.run("up", "--config", str(host.config))
            assert code == 0, errors
            [address] = re.findall(r"^ready: .* on (\S+) \(cpu\)", output, re.MULTILINE)
            with Client(address) as client:
                for _ in range(NUM_REQUESTS):
                    client.generate("x", max_tokens=1)
            logs = logs_of_processes(host)
        finally:
            host.run("down", "--grace-s", "0")

    assert max(map(len, logs.values())) == 1 + NUM_BACKUPS
    assert max(max(sizes) for sizes in logs.values()) <= MAX_BYTES


def logs_of_processes(host: Host) -> dict[str, list[int]]:
    """Return the sizes of the files of each log, by the log's name, in bytes."""
    [folder] = (host.private / "ray").glob("session_2*/logs")
    sizes = defaultdict(list)
    for each in os.scandir(folder):
        if each.name.startswith("worker-"):
            sizes[re.sub(r"\.\d+$", "", each.name)].append(each.stat().st_size)
    return sizes
