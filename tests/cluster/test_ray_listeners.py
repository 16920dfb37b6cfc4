import subprocess
import sys

import psutil
import pytest

from cluster.ray_listeners import find_listeners
from protos.addresses import is_loopback

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def listening(tmp_path):
    """Start what is named as asked and listens on an address; returns process and port."""
    processes = []

    def start(name, host, **environment):
        path = tmp_path / name
        path.symlink_to(sys.executable)
        process = subprocess.Popen(
            [path, "-I", "-c", LISTEN, host],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return psutil.Process(process.pid), process.stdout.readline().strip()

    yield start
    for each in processes:
        each.communicate("")


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_server_of_ray_on_all_interfaces_is_found_with_how_it_authenticates(listening, mode):
    process, port = listening("gcs_server", "0.0.0.0", RAY_AUTH_MODE=mode)

    [found] = find_listeners([process])

    assert found.process == f"gcs_server (pid {process.pid})"
    assert found.address == f"0.0.0.0:{port}"
    assert found.auth_mode == mode


def test_servers_on_the_loopback_address_and_other_processes_are_nobodys_door(listening):
    local, _ = listening("raylet", "127.0.0.1")
    other, _ = listening("nginx", "0.0.0.0")

    assert find_listeners([local, other]) == ()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
    ],
)
def test_what_only_this_host_reaches(host, is_local):
    assert is_loopback(host) == is_local
