"""Starts a cluster and a Ray that outlive this process, or finds the running ones."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import ray

from cli.foreground import ray_thread, run_start
from cli.stop_signals import StopSignals
from cluster.attach import ask_starting, attach_head, attach_ray, find_controller
from cluster.certificates import with_absolute_files
from cluster.config import ClusterConfig
from cluster.controller import ClusterFacts
from cluster.deployment import check_same
from cluster.devices import count_gpus
from cluster.disk_room import check_room
from cluster.environment import forwarded_environment
from cluster.errors import ConfigError, RayLost, StartError, Stopping
from cluster.launch import (
    RunningCluster,
    StartWatch,
    deploy,
    device_of_ray,
    find_cluster,
    starting,
    weights_read_ahead,
)
from cluster.local_head import ERROR, LocalHead, find_head, head_log, remove_head_left_behind
from cluster.local_ray import is_alive
from cluster.placement import has_own_gpus, variables_of_workers
from cluster.preflight import check_start

HEAD_TIMEOUT_S = 60.0  # for a Ray to start
END_TIMEOUT_S = 20.0  # for it to end
LOOK_PERIOD_S = 0.1


def bring_up(
    config: ClusterConfig,
    signals: StopSignals,
    say: Callable[[str], None],
) -> RunningCluster:
    """Start a cluster and detach from it; a running one must have this configuration.

    Args:
        config: The configuration of the cluster to start.
        signals: Entered; the first one ends the start.
        say: Gets progress messages.

    Raises:
        ClusterError: What is wrong and how to fix it; nothing started here is left running.
        Interrupted: A signal came before the cluster was ready; what ran before still runs.
    """
    deadline = time.monotonic() + config.start_timeout_s
    config = with_absolute_files(config)

    def start(watch: StartWatch) -> RunningCluster:
        try:
            return _start(watch)
        finally:
            ray.shutdown()

    def _start(watch: StartWatch) -> RunningCluster:
        head = None if config.ray_address else find_head()
        if head is not None:
            signals.goes_on = "what ran before still runs; `pagewire down` ends it"
            watch = _watching(watch, head)
            attach_head(head)
        elif config.ray_address:
            attach_ray(config.ray_address, shows_worker_logs=False)
        if ray.is_initialized() and (controller := find_controller()) is not None:
            signals.goes_on = "the cluster still runs; `pagewire status` shows it"
            facts: ClusterFacts = ask_starting(controller.facts.remote(), watch.say, watch.check)
            if facts.is_stopping:
                raise Stopping
            try:
                scaled = check_same(facts.config, facts.workers.counts, config)
            except ConfigError:
                # Whoever ended the cluster to start this one must not find it impossible then.
                check_start(config, watch.say, is_running=True)
                raise
            watch.say(f"a cluster with this configuration is already running: {_told(facts)}")
            for each in scaled:
                watch.say(each)
            return find_cluster(facts, deadline, watch)
        device = check_start(config, watch.say)
        if config.ray_address:
            device = device_of_ray(config)
            watch.say(starting(config, device))
            return deploy(config, device, deadline, watch, is_own_ray=False)
        assert device is not None
        watch.say(starting(config, device))
        with weights_read_ahead(config):
            if head is not None:  # the command that started it ended before there was a cluster
                return deploy(config, device, deadline, watch, is_own_ray=False)
            head = _start_head(config, device, watch.check)
            try:
                watch = _watching(watch, head)
                attach_head(head)
                return deploy(config, device, deadline, watch, is_own_ray=True)
            except BaseException:
                ray.shutdown()
                end_head()
                raise

    with ray_thread() as thread:
        return run_start(thread, signals, say, start)


def end_head() -> None:
    """End the Ray of `pagewire up` on this host, if any, and everything that runs on it.

    Raises:
        StartError: It does not end.
    """
    if head := find_head():
        _end(head)
    remove_head_left_behind()  # a second request ends it at once


def _start_head(config: ClusterConfig, device: str, check: Callable[[], None]) -> LocalHead:
    """Start a Ray that outlives this process, and wait until it runs."""
    num_gpus = count_gpus() if has_own_gpus(device, config.workers_per_gpu) else 0
    environment = variables_of_workers(config, device, forwarded_environment())
    log_path = head_log()
    check_room(log_path.parent)  # without it, the process could not even log why it ends
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(  # noqa: S603 - all arguments come from here
            [sys.executable, "-m", "cli.local_head", str(num_gpus)],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a terminal's signals and its end do not reach it
        )
    deadline = time.monotonic() + HEAD_TIMEOUT_S
    try:
        while (head := find_head()) is None or head.pid != process.pid:
            check()
            if process.poll() is not None:
                said = log_path.read_text(encoding="utf-8", errors="replace").strip()
                reason = said.rpartition("\n")[2].removeprefix(ERROR)
                raise StartError(reason or f"Ray did not start; see {log_path}")
            if time.monotonic() >= deadline:
                raise StartError(f"Ray did not start within {HEAD_TIMEOUT_S:.0f} s; see {log_path}")
            time.sleep(LOOK_PERIOD_S)
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        process.kill()
        raise
    return head


def _watching(watch: StartWatch, head: LocalHead) -> StartWatch:
    """Return a watch that also notices the end of a head."""

    def check() -> None:
        if find_head() != head:
            raise RayLost(
                "the Ray of this host has ended, perhaps by `pagewire down`, and everything with "
                f"it; see {head_log()}"
            )

    return watch.also(check)


def _end(head: LocalHead) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(head.pid)
        for end in (process.terminate, process.kill):
            if find_head() == head:  # its id cannot be another process's
                end()
            deadline = time.monotonic() + END_TIMEOUT_S
            while time.monotonic() < deadline:
                # Its last thread may hold the file for a moment longer.
                if not is_alive(process) and find_head() != head:
                    return
                time.sleep(LOOK_PERIOD_S)
        raise StartError(f"process {head.pid}, which runs Ray, does not end; see {head_log()}")


def _told(facts: ClusterFacts) -> str:
    workers = facts.workers
    leaving = f"; {', '.join(sorted(workers.leaving))} leave" if workers.leaving else ""
    return f"{', '.join(workers.names)} on {facts.device}{leaving}"
