"""Checks soon whether a Ray cluster can be attached to; Ray itself would try for up to a minute."""

import os
import socket
import time
from contextlib import suppress
from typing import Any

import grpc
from ray._private import services  # Ray has no public name for these
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.core.generated import gcs_service_pb2
from ray.exceptions import AuthenticationError

from cluster.errors import StartError
from protos.addresses import split_address

PROBE_TIMEOUT_S = 1.5  # of each of the first two steps
ANSWER_TIMEOUT_S = 5.0  # of the head, which may be busy
NODE_TIMEOUT_S = 10.0  # for a node of this host, which may just start
NODE_PERIOD_S = 0.2
AUTO = "auto"  # Ray looks for a cluster on this host
HEAD_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_MESSAGES: Any = gcs_service_pb2  # without types
_ALIVE = 0  # state of a node
_TOO_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
_REASONS = {
    _TOO_LATE: "what listens there did not answer in time: it is not the head of a Ray cluster, or "
    "its host is busy",
    grpc.StatusCode.UNAUTHENTICATED: "what listens there refuses the token of this process, or "
    "wants one; if it is a Ray, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
}
_Metadata = tuple[tuple[str, str], ...]


def check_ray_answers(address: str) -> None:
    """Refuse an address, host:port or "auto", of no Ray cluster that this process can attach to.

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
    try:
        socket.create_connection(split_address(found), PROBE_TIMEOUT_S).close()
        with grpc.insecure_channel(found) as channel:
            grpc.channel_ready_future(channel).result(PROBE_TIMEOUT_S)
            _wait_for_own_node(told, channel, _token_of_ray(address))
    except (grpc.FutureTimeoutError, grpc.RpcError) as error:
        code = error.code() if isinstance(error, grpc.RpcError) else _TOO_LATE
        reason = _REASONS.get(code, "what listens there is not the head of a Ray cluster")
        raise _no_answer(told, reason) from None
    except OSError as error:
        reason = str(error)
        if found != address:
            reason += (
                "; the Ray of `pagewire up` or `pagewire serve` listens on the loopback address "
                "alone, and commands on its host find it without ray_address"
            )
        raise _no_answer(told, reason) from error


def _wait_for_own_node(told: str, head: grpc.Channel, token: _Metadata) -> None:
    """Wait until a node of the cluster lives on this host, to which Ray would attach a process."""
    request = _MESSAGES.GetAllNodeInfoRequest(state_filter=_ALIVE).SerializeToString()
    ask = head.unary_unary(
        HEAD_METHOD, response_deserializer=_MESSAGES.GetAllNodeInfoReply.FromString
    )
    deadline = time.monotonic() + NODE_TIMEOUT_S
    while True:
        nodes = ask(request, timeout=ANSWER_TIMEOUT_S, metadata=token).node_info_list
        own_ids = services.find_node_ids()  # type: ignore[no-untyped-call]
        if any(each.node_id.hex() in own_ids for each in nodes):
            return
        if time.monotonic() >= deadline:
            others = ", ".join(sorted(each.node_manager_address for each in nodes))
            found = f", but on {others}; run the command there" if others else " or elsewhere"
            raise StartError(
                f"ray_address is {told}, and that Ray cluster has no living node on this host"
                f"{found}; `ray start --address=...` lets this host join"
            )
        time.sleep(NODE_PERIOD_S)


def _token_of_ray(address: str) -> _Metadata:
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
