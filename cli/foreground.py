"""Runs a cluster in the foreground: a signal ends it at any time and leaves nothing behind."""

import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from cli.load_display import load_display
from cli.stop_signals import StopSignals
from cluster.config import ClusterConfig
from cluster.descendants import no_descendant_left
from cluster.errors import ClusterError
from cluster.launch import RunningCluster, StartWatch, start_cluster

# Ray puts a handler in front of Python's, which prints a stack for each SIGTERM.
REINSTALL_PERIOD_S = 0.1


@contextmanager
def running_cluster(
    config: ClusterConfig,
    device: str | None,
    signals: StopSignals,
    *,
    shows_worker_logs: bool,
    say: Callable[[str], None],
) -> Iterator[RunningCluster]:
    """Start a cluster and stop it afterwards, which takes up to `config.stop_grace_s`.

    Args:
        config: The configuration of the cluster to start.
        device: The device of the workers, from preflight.check_start.
        signals: Entered; the first one ends the start, or the work inside.
        shows_worker_logs: Whether to pass the log lines of all processes to standard error.
        say: Gets progress messages; writes to standard output, as the progress bar does.

    Raises:
        ClusterError: What is wrong and how to fix it; nothing is left running.
        Interrupted: A signal came before the cluster was ready.
    """
    with no_descendant_left(), ray_thread() as thread:
        cluster = run_start(
            thread,
            signals,
            say,
            lambda watch: start_cluster(
                config, device, shows_worker_logs=shows_worker_logs, watch=watch
            ),
        )
        try:
            yield cluster
        finally:
            thread.submit(cluster.stop, config.stop_grace_s).result()


@contextmanager
def ray_thread() -> Iterator[ThreadPoolExecutor]:
    """Create a thread for all calls to Ray, because Ray takes over SIGTERM in a main thread.

    It lives as long as the processes that it starts, because Ray's processes end with the thread
    that started them.
    """
    logging.getLogger("ray._private.worker").addFilter(_is_no_signal_note)
    with ThreadPoolExecutor(
        max_workers=1, thread_name_prefix="ray", initializer=_block_hangups
    ) as thread:
        yield thread


def run_start(
    thread: ThreadPoolExecutor,
    signals: StopSignals,
    say: Callable[[str], None],
    start: Callable[[StartWatch], RunningCluster],
) -> RunningCluster:
    """Run a start in Ray's thread and show its progress; a signal ends it.

    Raises:
        ClusterError: What `start` raised.
        Interrupted: A signal came before the cluster was ready.
    """
    with load_display(say) as show_loaded:
        watch = StartWatch(say=say, show_loaded=show_loaded, check=signals.check)
        starting = thread.submit(start, watch)
        is_told = False
        while not wait([starting], timeout=REINSTALL_PERIOD_S).done:
            signals.install()
            if signals.stopped.is_set() and not is_told:
                is_told = True
                if not signals.goes_on:
                    say("stopping what has started; a second signal ends everything at once")
    signals.install()
    try:
        return starting.result()
    except ClusterError:
        signals.check()  # a signal to the whole process group ends Ray's processes, too
        raise


def _block_hangups() -> None:
    """Block SIGHUP in this thread and all processes that it starts.

    A closing terminal sends it to each of them, which would end processes of running requests.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def _is_no_signal_note(record: logging.LogRecord) -> bool:
    """Drop Ray's warning that it left the signals alone."""
    return "SIGTERM handler" not in record.getMessage()
