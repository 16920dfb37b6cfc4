"""A Ray that Pagewire starts: who reaches it, and who may use it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from cluster.launch import start_local_ray
from cluster.ray_listeners import find_listeners, open_sockets
from tests.support.local_ray import forget_token

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

JOIN = """
import sys, ray
ray.init(address=sys.argv[1], namespace="pagewire", log_to_driver=False)
print("joined", ray.get(ray.remote(num_cpus=0)(lambda: "and ran").remote()))
"""

# Python runs this at the start of each process of Ray: the agents wait here.
HOLD_AGENTS = """
import sys, time
from pathlib import Path
folder = Path(__file__).parent
deadline = time.monotonic() + 5.0
while any(word.endswith(("agent.py", "agent/main.py")) for word in sys.orig_argv):
    (folder / "held").touch()
    if (folder / "released").exists():
        break
    if time.monotonic() >= deadline:
        (folder / "late").touch()
        break
    time.sleep(0.01)
"""


def join(address, **environment):
    """Be another process of this host that wants to run a task."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return subprocess.run(
        [sys.executable, "-c", JOIN, address],
        env=kept | environment | {"RAY_NUM_REDIS_GET_RETRIES": "1"},  # by default 20, one a second
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def held_agents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    (folder / "sitecustomize.py").write_text(HOLD_AGENTS)
    return folder


@pytest.fixture(scope="module")
def local_ray(held_agents):
    """A Ray as `pagewire serve` starts it, with one actor; until that runs, its agents wait."""
    forget_token()
    path = os.pathsep.join([str(held_agents), os.environ.get("PYTHONPATH", "")])
    running = start_local_ray(0, {"PYTHONPATH": path}, shows_worker_logs=False)
    actor = ray.remote(num_cpus=0)(Actor).remote()
    ray.get(actor.pid.remote())
    (held_agents / "released").touch()
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    running.close()
    assert not token.exists()


class Actor:
    def pid(self):
        return os.getpid()

    def variable(self, name):
        return os.environ.get(name)


def test_a_ray_has_no_processes_but_those_that_a_cluster_uses(local_ray):
    """No dashboard, for which a start would wait, and no autoscaler."""
    children = psutil.Process().children()
    scripts = [Path(word).name for each in children for word in each.cmdline()[1:3]]

    assert {each.name() for each in children} >= {"gcs_server", "raylet"}
    assert [each for each in scripts if each.endswith(".py")] == ["log_monitor.py"]


def test_an_actor_starts_before_rays_agents_answer(local_ray, held_agents):
    assert not (held_agents / "late").exists()


def test_an_actor_may_have_variables_that_its_ray_does_not_have(local_ray, held_agents):
    """Workers that share a GPU do; one of the agents makes their environment."""
    variables = {"env_vars": {"ONLY_OF_THIS_ACTOR": "1"}}
    actor = ray.remote(num_cpus=0)(Actor).options(runtime_env=variables).remote()

    assert ray.get(actor.variable.remote("ONLY_OF_THIS_ACTOR"), timeout=30) == "1"
    assert (held_agents / "held").exists(), "else no agent waited in the test above"


def test_only_this_host_reaches_any_process_of_ray(local_ray):
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    names = {each.name() for each in processes}
    assert {"gcs_server", "raylet", "ray::Actor"} <= names
    assert any(each.net_connections("tcp") for each in processes if each.name() == "gcs_server")

    assert {each.name(): open_sockets(each) for each in processes if open_sockets(each)} == {}
    assert find_listeners(processes) == ()


def test_only_its_owner_reads_the_token_or_enters_the_folder_of_sockets_and_logs(local_ray):
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    session = Path(ray.get_runtime_context().get_temp_dir())

    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    assert session.parent == token.parent
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    commands = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    assert not [each for each in commands if token.read_text() in each]


@pytest.mark.parametrize(
    "environment",
    [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "00" * 32},
    ],
    ids=["without a token", "with another token"],
)
def test_a_process_without_the_token_runs_nothing(local_ray, environment):
    refused = join(local_ray, **environment)

    assert refused.returncode != 0
    assert "joined" not in refused.stdout
    assert "AuthenticationError" in refused.stderr


def test_a_process_with_the_token_may_join(local_ray):
    joined = join(
        local_ray, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=os.environ["RAY_AUTH_TOKEN_PATH"]
    )

    assert joined.stdout.strip() == "joined and ran", joined.stderr
