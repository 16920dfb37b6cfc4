"""Hosts of a network on one Linux kernel, each with its own addresses, processes and files.

A host is a process in new namespaces for network, processes, mounts and names; a switch is one
more, whose bridge connects them. Nothing outside sees their addresses. Powering a host off ends all
its processes at once and silently. Needs root and iproute2.
"""

import ctypes
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

# version of IP |-> the hosts' addresses without their numbers, and the bits of their network
NETWORKS = {4: ("10.99.0.", 24), 6: ("fd00:99::", 64)}
OWN_FOLDERS = ("/tmp/ray", "/dev/shm")  # noqa: S108 - of each host, gone when it is off
NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--ipc")
START_S = 10.0
END_S = 10.0
NOBODY = "02:00:00:00:ff:ff"  # no host's network card


def why_no_hosts(ip_version: int = 4) -> str:
    """Return why this machine cannot have hosts with such addresses; empty: it can."""
    if ip_version == 6 and not Path("/proc/net/if_inet6").exists():
        return "this kernel speaks no IPv6"
    if os.geteuid() != 0:
        return "namespaces need root"
    tools = ("ip", "nsenter", "setpriv", "unshare")
    if missing := [each for each in tools if not shutil.which(each)]:
        return f"{', '.join(missing)} is missing (Debian: iproute2, util-linux)"
    command = ["unshare", *NAMESPACES, "--fork", "true"]
    tried = subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - fixed
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


class Host:
    """One host, off until `power_on`."""

    def __init__(self, number: int, ip_version: int, switch: "_Namespaces") -> None:
        self.name = f"host{number}"
        network, bits = NETWORKS[ip_version]
        self.address = f"{network}{number}"
        self._network = f"{self.address}/{bits}"
        # It keeps its network card: others remember the card of an address for half a minute.
        self._card = f"02:00:00:00:00:{number:02x}"
        self._port = f"port{number}"  # its place on the switch
        self._switch = switch
        self._inside: _Namespaces | None = None

    @property
    def pid(self) -> int:
        """The process whose namespaces the host is."""
        return self._on().pid

    def power_on(self) -> None:
        """Start it with nothing on it, and plug it in."""
        self._inside = _Namespaces(self.name)
        link = ["ip", "link", "add", self._port, "netns", str(self._switch.pid), "type", "veth"]
        _do([*link, "peer", "name", "eth0", "address", self._card, "netns", str(self.pid)])
        self._switch.do("ip", "link", "set", self._port, "master", "switch", "up")
        # Without a search for others with the same address, during which IPv6 could not use it.
        nodad = ["nodad"] if ":" in self.address else []
        self._do("ip", "address", "add", self._network, "dev", "eth0", *nodad)
        self._do("ip", "link", "set", "eth0", "up")

    def power_off(self) -> None:
        """End all its processes, without a packet to the others."""
        if self._inside is not None:
            self._switch.do("ip", "link", "delete", self._port)  # the kernel would, but later
            self._inside.kill()
            self._inside = None

    def unplug(self) -> None:
        """Let nothing through, in either direction."""
        self._switch.do("ip", "link", "set", self._port, "down")

    def plug_in(self) -> None:
        """Let everything through again."""
        self._switch.do("ip", "link", "set", self._port, "up")

    def lose_packets_to(self, other: "Host") -> None:
        """Let no packet from here reach another host; those from there still come."""
        to_nobody = ("lladdr", NOBODY, "nud", "permanent")
        self._do("ip", "neighbour", "replace", other.address, "dev", "eth0", *to_nobody)

    def deliver_packets_to(self, other: "Host") -> None:
        """Let packets from here reach another host again."""
        self._do("ip", "neighbour", "delete", other.address, "dev", "eth0")

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a command on it; options as of subprocess.Popen, environment None: this one's."""
        command = self._on().entered(arguments)
        return subprocess.Popen(command, text=True, env=environment, **options)  # noqa: S603

    def run(
        self, *arguments: str, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run a command on it to its end; returns exit status, output and errors."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(*arguments, environment=environment, **pipes) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, output, errors

    @contextmanager
    def network(self) -> Iterator[None]:
        """Let processes that this thread starts meanwhile use only its network."""
        with (
            Path("/proc/thread-self/ns/net").open("rb") as own,
            Path(f"/proc/{self.pid}/ns/net").open("rb") as network,
        ):
            _enter(network)
            try:
                yield
            finally:
                _enter(own)

    def processes(self, text: str) -> list[psutil.Process]:
        """Return its processes whose command line contains a text."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            try:
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == own
                if is_here and text in " ".join(process.cmdline()):
                    found.append(process)
            except (OSError, psutil.Error):  # it has just ended
                continue
        return found

    def _do(self, *arguments: str) -> None:
        self._on().do(*arguments)

    def _on(self) -> "_Namespaces":
        assert self._inside is not None, f"{self.name} is off"
        return self._inside


@contextmanager
def hosts(count: int, ip_version: int = 4) -> Iterator[list[Host]]:
    """Yield hosts that run and reach each other; whatever runs there ends with the body.

    Args:
        count: How many.
        ip_version: 4 or 6, of their only addresses beside those of loopback and link.
    """
    with ExitStack() as stack:
        switch = _Namespaces("switch")
        stack.callback(switch.kill)
        switch.do("ip", "link", "add", "switch", "type", "bridge")
        switch.do("ip", "link", "set", "switch", "up")
        made = [Host(number, ip_version, switch) for number in range(1, count + 1)]
        for host in made:
            stack.callback(host.power_off)
            host.power_on()
        yield made


def _enter(network: IO[bytes]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network.fileno(), 0):
        raise OSError(ctypes.get_errno(), "setns")


class _Namespaces:
    """A first process with new namespaces; when it ends, so do all others there."""

    def __init__(self, name: str) -> None:
        folders = "".join(
            f"mkdir -p {each} && mount -t tmpfs none {each} && " for each in OWN_FOLDERS
        )
        script = f"hostname {name} && {folders} ip link set lo up && exec sleep infinity"
        self._launcher = subprocess.Popen(  # noqa: S603 - fixed arguments
            [
                *("setpriv", "--pdeathsig", "KILL"),  # it ends with whoever started it
                *("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", script),
            ],
            start_new_session=True,  # Ctrl-C is its owner's business
        )
        self.pid = self._first_process()

    def entered(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs another one in here."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, "--", *arguments]

    def do(self, *arguments: str) -> None:
        _do(self.entered(arguments))

    def kill(self) -> None:
        first = os.pidfd_open(self.pid)
        try:
            # unshare takes its child along, and would complain of one that SIGKILL has ended.
            self._launcher.kill()
            self._launcher.wait()
            if not select.select([first], [], [], END_S)[0]:
                raise OSError("a host's first process does not end")
        finally:
            os.close(first)

    def _first_process(self) -> int:
        children = Path(f"/proc/{self._launcher.pid}/task/{self._launcher.pid}/children")
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            pids = children.read_text().split()
            if pids and Path(f"/proc/{pids[0]}/comm").read_text() == "sleep\n":  # all is set up
                return int(pids[0])
            if self._launcher.poll() is not None:
                break
            time.sleep(0.01)
        self._launcher.kill()
        raise OSError("a host's first process does not start")


def _do(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)  # noqa: S603 - of this module
