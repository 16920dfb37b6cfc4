import ctypes
import socket
import subprocess
import sys

import pytest
import torch

from cluster import devices
from cluster.devices import (
    check_gpus,
    check_port_free,
    count_gpus,
    most_visible,
    resolve_device,
)
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
    with pytest.raises(PlacementError, match=r"found 2 and 3 workers which need 5 GPUs; .* 4"):
        check_gpus("cuda", 2, 3, 1, 4)
    check_gpus("cuda", 0, 1, 1, 1)
    with pytest.raises(PlacementError, match=r"allowed: --prefill 0 --decode 1, so .* is 1"):
        check_gpus("cuda", 1, 1, 1, 1)
    with pytest.raises(
        PlacementError, match=r"workers, 2 to a GPU, which need 3 GPUs.*--workers-.* are 2"
    ):
        check_gpus("cuda", 3, 2, 2, 2)
    check_gpus("cuda", 2, 2, 4, 1)  # all on one
    with pytest.raises(
        PlacementError, match=r"need 3 GPUs; .* --workers-per-gpu 5, so that all .* there is 1"
    ):
        check_gpus("cuda", 3, 2, 2, 1)
    with pytest.raises(PlacementError, match="device: found 'cuda'; allowed: 'cpu', because there"):
        check_gpus("cuda", 1, 1, 1, 0)


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


class Driver:
    """A libcuda that shows four devices, if its init succeeds."""

    def __init__(self, result):
        self.cuInit = lambda flags: result
        self.cuDeviceGetCount = self._count

    def _count(self, count):
        count._obj.value = 4
        return 0


@pytest.fixture
def host_with_gpus(monkeypatch):
    """Have a driver, a torch for CUDA that sees eight devices, and a way to say what it is."""

    def have(library, cuda="12.8"):
        def load(name):
            assert name == "libcuda.so.1"
            if library is None:
                raise OSError("cannot open shared object file")
            return library

        monkeypatch.setattr(devices, "most_gpus", lambda: 8)
        monkeypatch.setattr(devices.runpy, "run_path", lambda path: {"cuda": cuda})
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    return have


@pytest.mark.parametrize(
    ("library", "num_gpus"),
    [
        (Driver(0), 4),
        (Driver(100), 0),  # it says that there is none
        (Driver(802), 8),  # it is not ready yet
        (object(), 8),
        (None, 8),
    ],
    ids=["counts", "none", "not ready", "too old", "absent"],
)
def test_the_driver_counts_gpus_and_torch_only_where_it_cannot(host_with_gpus, library, num_gpus):
    host_with_gpus(library)

    assert count_gpus() == num_gpus


def test_a_torch_without_cuda_has_no_gpus(host_with_gpus):
    host_with_gpus(Driver(0), cuda=None)

    assert count_gpus() == 0


def test_a_host_with_gpus_and_without_the_engine_misses_torch(host_with_gpus, monkeypatch):
    host_with_gpus(Driver(0))
    monkeypatch.setattr(devices, "find_spec", lambda name: None)

    with pytest.raises(ModuleNotFoundError) as found:
        count_gpus()

    assert found.value.name == "torch", "the command names what to install"


def test_torchs_own_version_says_whether_it_has_cuda():
    code = (
        "import sys; from cluster.devices import _torch_has_cuda as has_cuda; "
        "print(has_cuda(), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.split() == [str(torch.version.cuda is not None), "False"]


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
