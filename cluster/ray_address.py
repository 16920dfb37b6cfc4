"""Checks at once whether a Ray cluster answers; Ray itself would try for half a minute."""

import os
import socket
from contextlib import suppress

import grpc
from ray._private import services  # Ray has no public name for these
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from cluster.errors import StartError

PROBE_TIMEOUT_S = 1.5  # of each of the first two steps
ANSWER_TIMEOUT_S = 5.0  # of the head, which may be busy
AUTO = "auto"  # Ray looks for a cluster on this host
# The first call that Ray itself makes; empty bytes are its request.
HEAD_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def check_ray_answers(address: str) -> None:
    """Refuse an address, host:port or "auto", where no Ray cluster answers or takes this process.

    Raises:
        StartError: Names the address, and says how to find the right one.
    """
    try:
        found = services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError):
        found = None
    if found is None:
        raise _no_answer(address, "Ray finds none on this host")
    told = address if found == address else f"{address}, for which Ray takes {found}"
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
        with grpc.insecure_channel(found) as channel:
            grpc.channel_ready_future(channel).result(PROBE_TIMEOUT_S)
            ask = channel.unary_unary(HEAD_METHOD)
            ask(b"", timeout=ANSWER_TIMEOUT_S, metadata=_token_of_ray(address))
    except (grpc.FutureTimeoutError, grpc.RpcError) as error:
        reason = "what listens there is not the head of a Ray cluster"
        if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
            reason = (
                "what listens there refuses the token of this process, or wants one; if it is a "
                "Ray, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            )
        raise _no_answer(told, reason) from None
    except OSError as error:
        reason = str(error)
        if found != address:
            reason += (
                "; the Ray of `pagewire up` or `pagewire serve` listens on the loopback address "
                "alone, and commands on its host find it without ray_address"
            )
        raise _no_answer(told, reason) from error


def _token_of_ray(address: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata with the token that Ray would send to an address; empty: none."""
    # Without a mode, Ray uses a token only for a cluster that it has found by itself.
    is_found = address == AUTO and not os.environ.get("RAY_ADDRESS")
    ignores_mode = is_found and "RAY_AUTH_MODE" not in os.environ
    loader = AuthenticationTokenLoader.instance()
    with suppress(AuthenticationError):  # this process has none
        return tuple(loader.get_token_for_http_header(ignore_auth_mode=ignores_mode).items())
    return ()


def _no_answer(told: str, reason: str) -> StartError:
    return StartError(
        f"ray_address is {told}, and no Ray cluster answers there: {reason}; `ray start --head` "
        "prints the address of a cluster, and `ray status --address=...` shows whether it runs"
    )
