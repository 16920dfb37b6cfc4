"""A host with the configuration of a cluster that outlives its launcher."""

import json
import os
import subprocess
import sys

from cluster.demo_model import write_demo_model

PAGE_SIZE = 16
OPTIONS = {
    "device": "cpu",
    "prefill": 1,
    "decode": 1,
    "page_size": PAGE_SIZE,
    "num_pages": 2048,
    "port": 0,
    "http_port": 0,
    "log_level": "warning",
    "stop_grace_s": 20.0,
    "decode_worker": {"local_prefill_max_tokens": 0, "heartbeat_s": 0.1},
    "prefill_worker": {"heartbeat_s": 0.1},
}


class Host:
    """A host of one user: a folder of its own for Ray, and one cluster's configuration."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = os.environ | {"RAY_TMPDIR": str(folder)}
        self.config = folder / "cluster.yaml"
        (folder / "model").mkdir()
        write_demo_model(folder / "model")
        self.config.write_text(json.dumps(OPTIONS | {"model": str(folder / "model")}))

    def start(self, command, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "cli", command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def run(self, command, *arguments):
        with self.start(command, *arguments) as process:
            output, errors = process.communicate(timeout=120)
        return process.returncode, output, errors

    def head(self):
        """What `pagewire up` has left for others to find."""
        return json.loads((self.private / "head").read_text())

    @property
    def private(self):
        return self.folder / f"pagewire-{os.geteuid()}"
