"""Runs a cluster in the foreground: a signal ends it at any time and leaves nothing."""

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
from cluster.launch import RunningCluster, start_cluster

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
        config: What to start.
        device: Of the workers, as preflight.check_start returns it.
        signals: Entered; the first one ends the start, or whatever goes on within.
        shows_worker_logs: Pass the log lines of all processes on to standard error.
        say: Told what happens; it writes to standard output, as a bar of the weights does.

    Raises:
        ClusterError: What was wrong and what to do; nothing is left running.
        Interrupted: A signal came before the cluster was ready.
    """
    # A thread of its own, because Ray takes over SIGTERM in a main thread. It lives as long as the
    # cluster, because Ray's processes end with the thread that started them.
    logging.getLogger("ray._private.worker").addFilter(_is_no_signal_note)
    with (
        no_descendant_left(),
        ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="ray", initializer=_block_hangups
        ) as thread,
    ):
        with load_display(say) as show_loaded:
            starting = thread.submit(
                start_cluster,
                config,
                device,
                shows_worker_logs=shows_worker_logs,
                say=say,
                show_loaded=show_loaded,
                check=signals.check,
            )
            is_told = False
            while not wait([starting], timeout=REINSTALL_PERIOD_S).done:
                signals.install()
                if signals.stopped.is_set() and not is_told:
                    is_told = True
                    say("stopping what has started; a second signal ends all at once")
        signals.install()
        try:
            cluster = starting.result()
        except ClusterError:
            signals.check()  # it went to the whole process group, and ended Ray's processes, too
            raise
        try:
            yield cluster
        finally:
            thread.submit(cluster.stop, config.stop_grace_s).result()


def _block_hangups() -> None:
    """Block SIGHUP in this thread and all processes that it starts.

    A terminal that closes sends it to each of them, and would end what running requests need.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def _is_no_signal_note(record: logging.LogRecord) -> bool:
    """Drop Ray's warning that it left the signals alone."""
    return "SIGTERM handler" not in record.getMessage()
