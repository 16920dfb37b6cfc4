"""Checks at once whether a Ray cluster answers; Ray itself would try for half a minute."""

import socket

import grpc

from cluster.errors import StartError

PROBE_TIMEOUT_S = 1.5  # of each of the two steps
AUTO = "auto"  # Ray looks for a cluster on this host


def check_ray_answers(address: str) -> None:
    """Refuse an address, host:port, where no Ray cluster answers; Ray itself checks "auto".

    Raises:
        StartError: Names the address, and says how to find the right one.
    """
    if address == AUTO:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(PROBE_TIMEOUT_S)
    except grpc.FutureTimeoutError:
        raise _no_answer(address, "what listens there is not the head of a Ray cluster") from None
    except OSError as error:
        raise _no_answer(address, str(error)) from error


def _no_answer(address: str, reason: str) -> StartError:
    return StartError(
        f"ray_address is {address}, and no Ray cluster answers there: {reason}; `ray start --head` "
        "prints the address of a cluster, and `ray status --address=...` shows whether it runs"
    )
