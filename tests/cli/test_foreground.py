import os
import signal
import subprocess
import time

from cli import foreground
from cli.foreground import running_cluster
from cli.stop_signals import StopSignals
from cluster.config_file import load_config


class FakeCluster:
    def __init__(self):
        self.process = subprocess.Popen(["sleep", "300"])

    def stop(self, grace_s):
        assert grace_s == 3


def test_a_hangup_does_not_end_what_the_cluster_started(monkeypatch):
    monkeypatch.setattr(foreground, "start_cluster", lambda *_, **__: FakeCluster())
    config = load_config(None, {"stop_grace_s": 3})

    with StopSignals() as signals:
        with running_cluster(config, "cpu", signals, shows_worker_logs=False, say=print) as cluster:
            os.kill(cluster.process.pid, signal.SIGHUP)
            time.sleep(0.2)

            assert cluster.process.poll() is None

        assert cluster.process.wait(5) == -signal.SIGKILL
