"""Where router, gateway and controller listen if a network interface is all that they are told."""

import asyncio
from types import SimpleNamespace

import pytest
import ray

from cluster.config_file import load_config
from cluster.controller import ControllerActor
from cluster.demo_model import demo_model_dir
from cluster.deployment import Deployment
from cluster.errors import ConfigError
from cluster.own_address import with_own_host
from cluster.placement import host_options
from cluster.router_settings import router_settings
from credentials.config import TlsSettings
from credentials.secret import ClusterSecret
from http_gateway.actor import GatewayActor, GatewayStart
from options.interfaces import NoAddress
from router.errors import ControllerGone
from router.process import RouterProcess
from tests.support.interfaces import have_interfaces
from tests.support.rarely import rarely

SECRET = ClusterSecret.generate()
OWN = "127.0.0.2"  # as good as any other, and not where they listen by default


@pytest.fixture(autouse=True)
def interfaces(monkeypatch):
    have_interfaces(monkeypatch, {"lo": ["127.0.0.1"], "eth0": [OWN]})


def config_of(**options):
    options = {"model": str(demo_model_dir()), "port": 0, "http_port": 0} | options
    return load_config(None, {"network_interface": "eth0", **options})


async def router_address(config):
    async def find_controller():
        raise ControllerGone("there is none")

    settings = router_settings(config, "router-0", SECRET.router_keys("router-0"))
    process = RouterProcess(settings, find_controller)
    address = await process.start()
    await process.stop(0.0)
    return address


async def gateway_address(config):
    gateway = GatewayActor.__new__(GatewayActor)
    start = GatewayStart(
        config=config.http_gateway,
        host=config.host,
        network_interface=config.network_interface,
        port=0,
        log_level="info",
        log_format="text",
        router_name="router-0",
        tls=TlsSettings(),
        router_tls=None,
    )
    await gateway.__init__(start)
    await gateway.stop(0.0)
    return await gateway.wait_ready()


async def controller_address(config):
    deployment = Deployment(
        config=config,
        device="cpu",
        secret=SECRET,
        home_resource="node:h",
        environment={},
        visible_gpus=None,
    )
    controller = ControllerActor.__new__(ControllerActor)
    await controller.__init__(deployment)
    await controller._members.stop()
    return await controller.address()


@pytest.fixture
def first_start(monkeypatch):
    """Processes ask whether Ray has restarted them; without a Ray, they would start one here."""
    context = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


@pytest.mark.parametrize("ray_address", ["", *rarely("auto")])
@pytest.mark.parametrize("address_of", [router_address, gateway_address, controller_address])
@pytest.mark.usefixtures("first_start")
def test_they_listen_there(address_of, ray_address):
    address = asyncio.run(address_of(config_of(ray_address=ray_address)))

    assert address.rpartition(":")[0] == OWN


@pytest.mark.parametrize("address_of", [router_address, gateway_address])
def test_a_host_that_is_named_counts_for_those_whom_clients_call(address_of):
    address = asyncio.run(address_of(config_of(host="127.0.0.1")))

    assert address.rpartition(":")[0] == "127.0.0.1"


@pytest.mark.parametrize("address_of", [router_address, gateway_address])
@pytest.mark.usefixtures("first_start")
def test_an_interface_that_has_gone_is_named(address_of, monkeypatch):
    have_interfaces(monkeypatch, {"lo": ["127.0.0.1"]})

    with pytest.raises(
        NoAddress, match=r"^network_interface: found 'eth0', which does not exist on gpu"
    ):
        asyncio.run(address_of(config_of()))


def test_commands_know_the_address_before_anything_listens(monkeypatch):
    assert with_own_host(config_of()).host == OWN
    assert with_own_host(config_of(host="0.0.0.0")).host == "0.0.0.0"
    have_interfaces(monkeypatch, {"lo": ["127.0.0.1"]})
    with pytest.raises(ConfigError, match=r"^network_interface: found 'eth0', which does not exi"):
        with_own_host(config_of())


def test_workers_are_told_the_options_and_not_this_hosts_address():
    options = {"ray_address": "auto", "nccl_interface": "ib0", "model_paths": {"a": "/x"}}
    config = config_of(**options)

    assert host_options(config, "cuda").nccl_interface == "ib0"
    assert host_options(config, "cpu").nccl_interface == ""
    assert host_options(config, "cpu").network_interface == "eth0"
    assert host_options(config, "cpu").model_paths == {"a": "/x"}
