import subprocess
import sys

# In a process of its own: at its end no child is left, such as the resource tracker of other tests.
PROGRAM = """
import os, signal, subprocess, time
from cli import foreground
from cli.stop_signals import StopSignals
from cluster.config_file import load_config

class FakeCluster:
    def __init__(self):
        self.process = subprocess.Popen(["sleep", "300"])

    def stop(self, grace_s):
        print("grace", grace_s)

foreground.start_cluster = lambda *_, **__: FakeCluster()
config = load_config(None, {"stop_grace_s": 3})
with StopSignals() as signals:
    with foreground.running_cluster(
        config, "cpu", signals, shows_worker_logs=False, say=print
    ) as cluster:
        os.kill(cluster.process.pid, signal.SIGHUP)
        time.sleep(0.2)
        print("after SIGHUP", cluster.process.poll())
    print("in the end", cluster.process.wait(5))
"""


def test_a_hangup_does_not_end_what_the_cluster_started():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-3:] == ["after SIGHUP None", "grace 3", "in the end -9"]
