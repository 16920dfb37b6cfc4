"""The process that runs the Ray of `pagewire up` on this host: `python -m cli.local_head GPUS`.

`pagewire up` starts it in a new session, so neither the end of that command nor a closing terminal
reaches it. It ends at SIGTERM, which `pagewire down` sends, or when a process of Ray ends, without
which nothing could be restarted. Then nothing that it started is left.
"""

import os
import sys

from cli.foreground import ray_thread
from cli.stop_signals import StopSignals
from cluster.descendants import no_descendant_left
from cluster.environment import prepare_ray
from cluster.errors import ClusterError
from cluster.local_head import ERROR, HeadFile, LocalHead, holding_head_file
from cluster.private_folder import TOKEN_PATH_VARIABLE

RAY_PERIOD_S = 1.0  # between two checks that Ray's own processes run


def main(num_gpus: int) -> None:
    """Run a Ray until SIGTERM."""
    prepare_ray(is_local=True)
    try:
        with holding_head_file() as file, StopSignals() as signals:
            _keep(num_gpus, file, signals)
    except ClusterError as error:
        sys.exit(f"{ERROR}{error}")


def _keep(num_gpus: int, file: HeadFile, signals: StopSignals) -> None:
    import ray

    from cluster.launch import shut_down_ray, start_local_ray

    with no_descendant_left(), ray_thread() as thread:
        local_ray = thread.submit(start_local_ray, num_gpus, shows_worker_logs=False).result()
        try:
            signals.install()
            address = thread.submit(lambda: ray.get_runtime_context().gcs_address).result()
            token_path = os.environ[TOKEN_PATH_VARIABLE]
            file.publish(LocalHead(pid=os.getpid(), ray_address=address, token_path=token_path))
            while not signals.stopped.wait(RAY_PERIOD_S):
                local_ray.check()
            thread.submit(shut_down_ray).result()
        finally:
            local_ray.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
