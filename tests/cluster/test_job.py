"""A job of Ray's dashboard ships the code, starts a cluster, and ends; the cluster stays.

The dashboard needs packages that nothing else needs. `make thorough` installs them in their own
environment, which also sees the packages of the tests.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cluster.demo_model import demo_model_dir
from pagewire import Client
from tests.cluster.oracle import GreedyOracle
from tests.support.free_ports import free_port

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("JOBS_PYTHON") or Path(sys.prefix) / "jobs" / "bin" / "python")
# As pip writes it.
SCRIPT = """#!{python}
import sys
from pagewire.cli.__main__ import main
if __name__ == '__main__':
    sys.exit(main())
"""
TIMEOUT_S = 120
PROMPT = list(range(3, 90))

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.thorough,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(
        not PYTHON.exists(), reason="Ray's dashboard is not installed; `make thorough` installs it"
    ),
]


@pytest.fixture
def python(tmp_path):
    """The Python of a host where an older Pagewire is installed, which cannot be imported."""
    host = tmp_path / "host"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", host], check=True)
    python = host / "bin" / "python"
    print_path = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages, *others = (
        subprocess.check_output([each, "-c", print_path], text=True).strip()
        for each in (python, PYTHON, sys.executable)
    )
    (Path(packages) / "dependencies.pth").write_text("\n".join(others))
    for name in ("pagewire", "cli", "cluster", "worker"):
        older = Path(packages) / name / "__init__.py"
        older.parent.mkdir()
        older.write_text("raise SystemExit('an older Pagewire')")
    script = host / "bin" / "pagewire"
    script.write_text(SCRIPT.format(python=python))
    script.chmod(0o755)
    return str(python)


@pytest.fixture
def head(tmp_path, python):
    """A Ray head with its dashboard."""
    port, dashboard, client = free_port(), free_port(), free_port()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name != "PYTHONPATH"
    }
    environment |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PATH": f"{Path(python).parent}:{environment['PATH']}",
    }
    temp_dir = Path("/tmp") / f"pw-job-{os.getpid()}"  # sockets have short paths
    options = {
        "--port": port,
        "--node-ip-address": "127.0.0.1",
        "--dashboard-host": "127.0.0.1",
        "--dashboard-port": dashboard,
        "--ray-client-server-port": client,
        "--temp-dir": temp_dir,
        "--num-cpus": 2,
    }
    words = [f"{name}={value}" for name, value in options.items()]
    with (tmp_path / "head.log").open("w") as log:
        process = subprocess.Popen(
            [
                python,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--head",
                "--include-dashboard=true",
                "--block",
                *words,
            ],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{dashboard}"
    try:
        until_it_answers(f"{url}/api/version")
        yield SimpleNamespace(
            address=f"127.0.0.1:{port}",
            url=url,
            temp_dir=temp_dir,
            environment=environment,
            python=python,
        )
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(temp_dir, ignore_errors=True)


def until_it_answers(url):
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            assert time.monotonic() < deadline, "the dashboard does not answer"
            time.sleep(0.2)


def run(head, folder, *words):
    return subprocess.run(
        words,
        cwd=folder,
        env=head.environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def code_of(head):
    """Return the folders with the code of the workers, by name."""
    folders = {}
    for process in psutil.process_iter(["name", "cwd", "cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if title.startswith(("ray::PrefillActor", "ray::DecodeActor")):
            cwd = process.info["cwd"] or ""
            if cwd.startswith(str(head.temp_dir)):
                folders[process.pid] = cwd
    return list(folders.values())


def test_a_job_ships_the_code_which_precedes_an_older_one_and_the_cluster_outlives_it(
    head, tmp_path
):
    shipped = tmp_path / "shipped"
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.json"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for path in tracked:
        if not path.startswith(("tests/", "benchmarks/", "docs/")):
            (shipped / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, shipped / path)
    port = free_port()
    model = demo_model_dir()

    submitted = run(
        head,
        tmp_path,
        *(head.python, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.url),
        *("--working-dir", str(shipped), "--"),
        *("pagewire", "up", "--ray-address", "auto", "--model", str(model)),
        *("--device", "cpu", "--insecure", "--port", str(port), "--http-port", "0"),
        *("--decode-worker-local-prefill-max-tokens", "0"),
    )

    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert f"on 127.0.0.1:{port} (cpu)" in submitted.stdout
    shutil.rmtree(shipped)  # the cluster has a copy
    scaled = run(
        head,
        ROOT,
        *(head.python, "-m", "cli", "scale", "--decode", "2", "--ray-address", head.address),
    )
    assert scaled.stdout.splitlines()[-1] == "the cluster has 1 prefill and 2 decode workers", (
        scaled.stderr
    )
    folders = code_of(head)
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert "working_dir_files" in folders[0]
    with Client(f"127.0.0.1:{port}") as client:
        answer = client.generate(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == GreedyOracle(model).tokens(PROMPT, 12)
    assert answer.usage.pages_moved > 0
    assert answer.usage.decode_computed_tokens == 0
    ended = run(head, ROOT, head.python, "-m", "cli", "down", "--ray-address", head.address)
    assert ended.stdout.splitlines()[-1] == "stopped"
