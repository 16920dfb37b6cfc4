import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from ray._private import services
from ray.core.generated import gcs_service_pb2

from cluster import ray_address
from cluster.errors import StartError
from cluster.ray_address import HEAD_METHOD, check_ray_answers
from tests.support.wall_clock import assert_within


def test_a_port_that_nobody_listens_on_is_refused_at_once():
    started = time.monotonic()

    with pytest.raises(StartError, match=r"ray_address is 127\.0\.0\.1:1, .* refused; .ray start"):
        check_ray_answers("127.0.0.1:1")

    assert_within(time.monotonic() - started, 1)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_listener_that_never_answers_is_refused_within_three_seconds(accepts):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1 if accepts else 0)
        started = time.monotonic()

        with pytest.raises(StartError, match="did not answer in time: it is not the head of a Ray"):
            check_ray_answers(f"127.0.0.1:{silent.getsockname()[1]}")

    assert_within(time.monotonic() - started, 3.5)


def test_a_head_that_is_busy_is_not_said_to_be_none(ray_uses, monkeypatch):
    ray_uses("127.0.0.1")
    monkeypatch.setattr(ray_address, "ANSWER_TIMEOUT_S", 0.1)
    is_over = threading.Event()

    def answer(request, context):
        is_over.wait(10)
        return nodes(own="127.0.0.1")

    with answering(HEAD_METHOD, answer) as address:
        with pytest.raises(StartError, match=r"did not answer in time: .* or its host is busy"):
            check_ray_answers(address)
        is_over.set()


def test_an_unknown_host_is_refused():
    with pytest.raises(StartError, match="no Ray cluster answers there"):
        check_ray_answers("no-such-host.invalid:6379")


@contextmanager
def answering(method, answer):
    """A gRPC server with one method, which `answer` answers; yields its address."""

    class Service(grpc.GenericRpcHandler):
        def service(self, call):
            if call.method == method:
                return grpc.unary_unary_rpc_method_handler(answer)
            return None

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Service()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


OWN_NODE = b"\x0a" * 28


def nodes(**address_of):
    """What a head answers: its nodes, the own one and others."""
    ids = {"own": OWN_NODE, "other": b"\x0b" * 28}
    reply = gcs_service_pb2.GetAllNodeInfoReply()
    for name, address in address_of.items():
        reply.node_info_list.add(node_id=ids[name], node_manager_address=address)
    return reply.SerializeToString()


@pytest.fixture
def ray_uses(monkeypatch):
    """Have Ray take another address of this host for the loopback address, and find one node."""
    monkeypatch.setattr(services, "find_node_ids", lambda: {OWN_NODE.hex()})
    return lambda address: monkeypatch.setattr(services, "get_node_ip_address", lambda: address)


def test_a_ray_cluster_with_a_node_on_this_host_passes(ray_uses):
    ray_uses("127.0.0.1")
    answers = [nodes(), nodes(other="10.0.0.1"), nodes(other="10.0.0.1", own="10.0.0.2")]
    asked = []

    def answer(request, context):
        asked.append(gcs_service_pb2.GetAllNodeInfoRequest.FromString(request))
        return answers[len(asked) - 1]

    with answering(HEAD_METHOD, answer) as address:
        check_ray_answers(address)

    assert len(asked) == len(answers), "a node may just start"
    assert asked[0].HasField("state_filter"), "of living nodes"


@pytest.mark.parametrize(
    ("answer", "where"),
    [
        (nodes(), "or elsewhere"),
        (nodes(other="10.0.0.1"), r"but on 10\.0\.0\.1; run the command there"),
    ],
    ids=["no node", "on another host"],
)
def test_a_ray_cluster_without_a_node_on_this_host_is_refused_in_time(
    ray_uses, monkeypatch, answer, where
):
    ray_uses("127.0.0.1")
    monkeypatch.setattr(ray_address, "NODE_TIMEOUT_S", 0.3)

    with (
        answering(HEAD_METHOD, lambda request, context: answer) as address,
        pytest.raises(StartError, match=f"no living node on this host,? {where}; .*join$"),
    ):
        check_ray_answers(address)


def test_a_grpc_server_that_is_no_ray_is_refused_at_once(ray_uses):
    ray_uses("127.0.0.1")
    started = time.monotonic()

    with (
        answering("/another/Method", lambda request, context: b"") as address,
        pytest.raises(StartError, match="not the head of a Ray cluster"),
    ):
        check_ray_answers(address)

    assert_within(time.monotonic() - started, 1)


def test_a_ray_that_refuses_the_token_is_told_apart(ray_uses):
    ray_uses("127.0.0.1")

    def refuse(request, context):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")

    with (
        answering(HEAD_METHOD, refuse) as address,
        pytest.raises(StartError, match=r"refuses the token .* RAY_AUTH_TOKEN_PATH"),
    ):
        check_ray_answers(address)


@pytest.mark.parametrize(
    ("mode", "is_given", "told"),
    [(None, False, "Bearer x"), (None, True, None), ("disabled", False, None)],
    ids=["found", "given", "disabled"],
)
def test_only_a_ray_that_is_found_here_is_told_a_token_without_a_mode(
    ray_uses, monkeypatch, mode, is_given, told
):
    class Loader:
        instance = staticmethod(lambda: Loader)

        @staticmethod
        def get_token_for_http_header(ignore_auth_mode):
            return {"authorization": "Bearer x"} if ignore_auth_mode else {}

    monkeypatch.setattr(ray_address, "AuthenticationTokenLoader", Loader)
    for variable in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(variable, raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    ray_uses("127.0.0.1")
    got = []

    def listen(request, context):
        got.append(dict(context.invocation_metadata()).get("authorization"))
        return nodes(own="127.0.0.1")

    with answering(HEAD_METHOD, listen) as address:
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset([address]))
        check_ray_answers(address if is_given else "auto")

    assert got == [told]


def test_an_address_for_which_ray_takes_another_is_told_with_it(ray_uses):
    ray_uses("127.0.0.2")

    with answering(HEAD_METHOD, lambda request, context: b"") as address:
        port = address.rpartition(":")[2]
        told = f"ray_address is {address}, for which Ray takes 127.0.0.2:{port}, and no Ray .* refu"
        with pytest.raises(StartError, match=told + ".* find it without ray_address; `ray start"):
            check_ray_answers(address)


def test_what_ray_finds_by_itself_is_checked_too(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.255.255.255:1")

    with pytest.raises(StartError, match=r"is auto, for which Ray takes 10\.255\.255\.255:1, and"):
        check_ray_answers("auto")


def test_a_host_without_a_ray_is_told(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)

    with pytest.raises(StartError, match=r"ray_address is auto, .* finds none on this host"):
        check_ray_answers("auto")
