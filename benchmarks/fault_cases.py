"""The faults of benchmarks.faults: parts of a hosted cluster, and how each fails."""

import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from benchmarks.hosted_cluster import CommandFailed, HostedCluster
from benchmarks.hosts import Host

HANG_S = 10.0
MINUTE_S = 60.0
LONG_S = 90.0
HOUR_S = 3600
JUMP_PERIOD_S = 2.0
JUMPS = "jumps an hour ahead, two back and one ahead, every 2 s"
FILLER = "/tmp/ray/filler"  # noqa: S108 - on a file system of the host's own

Heal = Callable[[], None]
Begin = Callable[[HostedCluster], Heal]
Find = Callable[[HostedCluster], tuple[Host, str]]  # where a process is, and a part of its command


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault."""

    what: str
    begin: Begin  # returns a function that ends it
    lasts_s: float = 0.0
    uses_second_router: bool = False  # clients begin at the one outside Ray
    prepare: Callable[[HostedCluster], None] = lambda _: None  # before anything runs
    is_idle: bool = False  # no request can be served meanwhile: streams begin afterwards
    has_clocks: bool = False  # of a cluster whose wall clocks can jump


def kill(find: Find) -> Begin:
    """Return a fault that kills processes."""

    def begin(cluster: HostedCluster) -> Heal:
        _signal(cluster, find, signal.SIGKILL)
        return lambda: None

    return begin


def hang(find: Find) -> Begin:
    """Return a fault that stops processes without ending them."""

    def begin(cluster: HostedCluster) -> Heal:
        stopped = _signal(cluster, find, signal.SIGSTOP)

        def heal() -> None:
            for process in stopped:
                if process.is_running():  # Ray may have killed it
                    process.send_signal(signal.SIGCONT)

        return heal

    return begin


def partition(cluster: HostedCluster) -> Heal:
    """Take a host of workers off the network."""
    host = cluster.worker_hosts[0]
    host.unplug()
    return host.plug_in


def part(cluster: HostedCluster) -> Heal:
    """Let the two hosts of workers not reach each other; all other hosts reach both."""
    one, other = cluster.worker_hosts
    one.lose_packets_to(other)
    other.lose_packets_to(one)

    def heal() -> None:
        one.deliver_packets_to(other)
        other.deliver_packets_to(one)

    return heal


def lose_one_way(cluster: HostedCluster) -> Heal:
    """Lose what the head sends to a host of workers, but nothing of the other direction."""
    host = cluster.worker_hosts[0]
    cluster.head.lose_packets_to(host)
    return lambda: cluster.head.deliver_packets_to(host)


def lose_power(host_of: Callable[[HostedCluster], Host]) -> Begin:
    """Return a fault that ends a host with all its processes."""

    def begin(cluster: HostedCluster) -> Heal:
        host = host_of(cluster)
        host.power_off()

        def heal() -> None:
            host.power_on()
            cluster.start_ray(host)

        return heal

    return begin


def fill_disk(cluster: HostedCluster) -> Heal:
    """Fill the file system that Ray and all its processes write to."""
    host = cluster.worker_hosts[0]
    host.run("sh", "-c", f"cat /dev/zero > {FILLER}")
    return lambda: host.run("rm", FILLER) and None


def jump(host_of: Callable[[HostedCluster], Host]) -> Begin:
    """Return a fault that sets a host's wall clock ahead, then back, and right at the end."""

    def begin(cluster: HostedCluster) -> Heal:
        clock = cluster.clocks[host_of(cluster).name]
        clock.jump(HOUR_S)
        time.sleep(JUMP_PERIOD_S)
        clock.jump(-2 * HOUR_S)
        return lambda: clock.jump(HOUR_S)

    return begin


def end_in_mid_start(cluster: HostedCluster) -> Heal:
    """Kill `pagewire up` before it has started everything; then run it again to the end."""
    while True:
        launcher = cluster.begin(cluster.head, "up", "--config", str(cluster.config))
        began = time.monotonic()
        due_s = random.uniform(0, cluster.start_s)  # noqa: S311 - nothing secret
        while launcher.poll() is None and time.monotonic() < began + due_s:
            time.sleep(0.01)
        if launcher.poll() is None:
            _signal(cluster, _launcher("up"), signal.SIGKILL)
            launcher.wait()
            return lambda: cluster.bring_up()
        cluster.end()  # it was faster


def serve_anew(cluster: HostedCluster) -> None:
    """End the cluster, and start it by `pagewire serve`."""
    cluster.end()
    cluster.begin(cluster.head, "serve", "--config", str(cluster.config))
    cluster.until_whole()


def _launcher(command: str) -> Find:
    return lambda cluster: (cluster.head, f"-m cli {command}")


def _of_workers(name: str) -> Find:
    return lambda cluster: (cluster.worker_hosts[0], f"ray::{name}")


def _of_head(name: str) -> Find:
    return lambda cluster: (cluster.head, f"ray::{name}")


def _outside(cluster: HostedCluster) -> tuple[Host, str]:
    return cluster.edge, "cli router"


def _signal(
    cluster: HostedCluster,
    find: Find,
    number: signal.Signals,
) -> list[psutil.Process]:
    host, text = find(cluster)
    found = [each for each in host.processes(text) if each.name() != "sh"]
    if len(found) != 1:
        raise CommandFailed(f"{len(found)} processes are {text} on {host.name}")
    for each in found:
        each.send_signal(number)
    return found


FAULTS: Mapping[str, Fault] = {
    "none": Fault(what="none: the measurement itself", begin=lambda _: lambda: None),
    "kill/decode": Fault(what="SIGKILL of a decode worker", begin=kill(_of_workers("DecodeActor"))),
    "kill/prefill": Fault(
        what="SIGKILL of a prefill worker", begin=kill(_of_workers("PrefillActor"))
    ),
    "kill/router": Fault(
        what="SIGKILL of the router in Ray, which clients use", begin=kill(_of_head("RouterActor"))
    ),
    "kill/router-outside": Fault(
        what="SIGKILL of a router outside Ray, which clients use",
        begin=kill(_outside),
        uses_second_router=True,
    ),
    "kill/controller": Fault(
        what="SIGKILL of the controller", begin=kill(_of_head("ControllerActor"))
    ),
    "hang/decode": Fault(
        what="SIGSTOP of a decode worker for 10 s",
        begin=hang(_of_workers("DecodeActor")),
        lasts_s=HANG_S,
    ),
    "hang/prefill": Fault(
        what="SIGSTOP of a prefill worker for 10 s",
        begin=hang(_of_workers("PrefillActor")),
        lasts_s=HANG_S,
    ),
    "hang/router": Fault(
        what="SIGSTOP of the router that clients use for 20 s",
        begin=hang(_of_head("RouterActor")),
        lasts_s=2 * HANG_S,
    ),
    "hang/controller": Fault(
        what="SIGSTOP of the controller for 10 s",
        begin=hang(_of_head("ControllerActor")),
        lasts_s=HANG_S,
    ),
    "partition/workers": Fault(
        what="a host of workers without network for 10 s", begin=partition, lasts_s=HANG_S
    ),
    "partition/long": Fault(
        what=f"a host of workers without network for {LONG_S:.0f} s",
        begin=partition,
        lasts_s=LONG_S,
    ),
    "partition/pair": Fault(
        what="the two hosts of workers do not reach each other for 10 s, all others reach both",
        begin=part,
        lasts_s=HANG_S,
    ),
    "partition/one-way": Fault(
        what="all that the head's host sends to a host of workers is lost for 10 s, nothing of the "
        "other direction",
        begin=lose_one_way,
        lasts_s=HANG_S,
    ),
    "loss/workers": Fault(
        what="a host of workers without power for 10 s",
        begin=lose_power(lambda cluster: cluster.worker_hosts[0]),
        lasts_s=HANG_S,
    ),
    "loss/head": Fault(
        what="the host of Ray's head, the controller and a router without power for a minute",
        begin=lose_power(lambda cluster: cluster.head),
        lasts_s=MINUTE_S,
    ),
    "disk/full": Fault(
        what="no room on the disk of a host of workers for 10 s", begin=fill_disk, lasts_s=HANG_S
    ),
    "clock/workers": Fault(
        what=f"the wall clock of a host of workers {JUMPS}",
        begin=jump(lambda cluster: cluster.worker_hosts[0]),
        lasts_s=2 * JUMP_PERIOD_S,
        has_clocks=True,
    ),
    "clock/head": Fault(
        what=f"the wall clock of the host of Ray's head, the controller and a router {JUMPS}",
        begin=jump(lambda cluster: cluster.head),
        lasts_s=2 * JUMP_PERIOD_S,
        has_clocks=True,
    ),
    "launcher/start": Fault(
        what="SIGKILL of `pagewire up` before the cluster serves; it is run again",
        prepare=lambda cluster: cluster.end(),
        begin=end_in_mid_start,
        is_idle=True,
    ),
    "launcher/serve": Fault(
        what="SIGKILL of `pagewire serve`, on a Ray that runs already",
        prepare=serve_anew,
        begin=kill(_launcher("serve")),
    ),
}
