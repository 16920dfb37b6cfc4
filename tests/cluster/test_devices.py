import socket

import pytest

from cluster.devices import check_gpus, check_port_free, most_visible, resolve_device
from cluster.environment import forwarded_environment, worker_environment
from cluster.errors import ConfigError, PlacementError


def test_auto_takes_the_gpus_where_there_are_any():
    assert resolve_device("auto", 0) == "cpu"
    assert resolve_device("auto", 1) == "cuda"
    assert resolve_device("cpu", 8) == "cpu"
    assert resolve_device("cuda", 0) == "cuda"


def test_more_workers_than_gpus_are_refused():
    check_gpus("cuda", 2, 2, 1, 4)
    check_gpus("cpu", 50, 50, 1, 0)
    check_gpus("cuda", 3, 2, 2, 3)
    with pytest.raises(PlacementError, match=r"2 prefill and 3 decode workers need 5 GPUs.* 4;"):
        check_gpus("cuda", 2, 3, 1, 4)
    check_gpus("cuda", 0, 1, 1, 1)
    with pytest.raises(PlacementError, match=r"is 1; ask for --prefill 0 --decode 1, so that"):
        check_gpus("cuda", 1, 1, 1, 1)
    with pytest.raises(
        PlacementError, match=r"workers, 2 to a GPU, need 3 GPUs.* are 2;.*--workers-"
    ):
        check_gpus("cuda", 3, 2, 2, 2)
    check_gpus("cuda", 2, 2, 4, 1)  # all on one
    with pytest.raises(
        PlacementError, match=r"need 3 GPUs, and there is 1; .* --workers-per-gpu 5, so that all"
    ):
        check_gpus("cuda", 3, 2, 2, 1)


@pytest.mark.parametrize(
    ("visible", "num_gpus"),
    [
        (None, 4),
        ("0,1", 2),
        (" 2, 3", 2),
        ("GPU-8932f937", 1),
        ("0,1,2,3,4,5", 4),
        ("1,-1,2", 1),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
    ],
)
def test_hidden_gpus_do_not_count(visible, num_gpus):
    assert most_visible(4, visible) == num_gpus


def test_a_taken_port_is_refused_and_a_free_one_is_not():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PlacementError, match=f"port {port} on 127.0.0.1 is in use"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "nowhere.invalid", "x" * 64])
def test_a_host_that_is_not_this_one_is_a_wrong_option(host):
    with pytest.raises(ConfigError, match=rf"^host: found '{host}'; allowed: .* with --host: 127"):
        check_port_free(host, 50051)


def test_workers_get_named_variables_only(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "x")

    environment = worker_environment("cuda", 1, forwarded_environment())

    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["CUDA_MODULE_LOADING"] == "EAGER"
    assert "SECRET_TOKEN" not in environment
    assert worker_environment("cpu", 3, {})["OMP_NUM_THREADS"] == "3"


def test_nccl_is_bound_to_the_interface_unless_the_environment_says_otherwise():
    def bound_to(device="cuda", interface="eth0", **forwarded):
        return worker_environment(device, 1, forwarded, interface).get("NCCL_SOCKET_IFNAME")

    assert bound_to() == "=eth0"  # that one alone, and not eth01
    assert bound_to(NCCL_SOCKET_IFNAME="ib0") == "ib0"
    assert bound_to(interface="") is None
    assert bound_to("cpu") is None
