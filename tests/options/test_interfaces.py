import psutil
import pytest

from options.interfaces import NoAddress, address_on, is_interface
from tests.support.interfaces import have_interfaces

MAC = "02:42:ac:11:00:02"


@pytest.mark.parametrize(
    ("addresses", "wanted"),
    [
        ([MAC, "10.0.0.2"], "10.0.0.2"),
        (["10.0.0.2", "10.0.0.3"], "10.0.0.2"),
        (["fd00::2", "10.0.0.2"], "10.0.0.2"),
        (["fe80::1%eth0", "fd00::2", "fd00::3"], "fd00::2"),
        (["fd00:0:0::2%eth0"], "fd00::2"),
    ],
    ids=["IPv4", "the first", "IPv4 before IPv6", "no link-local one", "without its zone"],
)
def test_the_address_that_others_can_use_is_found(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], wanted: str
) -> None:
    have_interfaces(monkeypatch, {"lo": ["127.0.0.1"], "eth0": addresses})

    assert address_on("eth0") == wanted


@pytest.mark.parametrize(
    ("interface", "reason"),
    [
        ("eth7", "which does not exist"),
        ("eth1", "which is down"),
        ("eth2", "which has neither an IPv4 address nor an IPv6 address that is not link-local"),
        ("eth3", "which has neither an IPv4 address nor an IPv6 address that is not link-local"),
        ("eth", "which does not exist"),
    ],
)
def test_an_interface_that_cannot_do_is_refused_with_those_that_can(
    monkeypatch: pytest.MonkeyPatch, interface: str, reason: str
) -> None:
    interfaces = {
        "lo": ["127.0.0.1", "::1"],
        "eth0": ["10.0.0.2", MAC],
        "eth1": ["10.1.0.2"],
        "eth2": ["fe80::1%eth2", MAC],
        "eth3": [],
        "ib0": ["fd00::2"],
    }
    have_interfaces(monkeypatch, interfaces, down={"eth1"})

    with pytest.raises(NoAddress) as caught:
        address_on(interface, option="nccl_interface")

    assert str(caught.value) == (
        f"nccl_interface: found {interface!r}, {reason} on gpu-a; allowed: lo (127.0.0.1), "
        "eth0 (10.0.0.2), ib0 (fd00::2)"
    )


def test_a_host_without_any_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    have_interfaces(monkeypatch, {"eth0": ["10.0.0.2"]}, down={"eth0"})

    with pytest.raises(NoAddress, match="on gpu-a, where no interface has an address"):
        address_on("eth0")


def test_this_host_is_asked() -> None:
    loopback = {name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in str(found)}

    assert {address_on(name) for name in loopback} == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["", "eth0", "br-0a1b2c3d4e5f", "eth0.100", "wlp3s0"])
def test_names_of_interfaces(name: str) -> None:
    assert is_interface(name)


@pytest.mark.parametrize("name", ["eth0,eth1", "^lo", "=eth0", "eth 0", "a/b", "x" * 16, None, 3])
def test_what_is_no_name_of_one_interface(name: object) -> None:
    assert not is_interface(name)
