"""Routers hear of the members over gRPC, whatever happens to the controller; strangers do not."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.server import MemberServer
from credentials.cluster import ClusterCredentials
from credentials.config import TlsSettings
from credentials.door import ClusterLinks
from credentials.party import CONTROLLER_PARTY_NAME
from credentials.rules import CONTROLLER_CALLERS
from credentials.secret import ClusterSecret
from observability.logs import ATTRIBUTE
from pagewire.protos import controller_pb2, controller_pb2_grpc
from protos.contract import CONTRACT_VERSION
from router import member_feed, process, reported_wait, wire
from router.errors import ControllerGone
from router.member_feed import MemberFeed
from router.membership import WorkerMember
from tests.support.certificates import Authority
from tests.support.cluster_keys import SECRET
from tests.support.waiting import until
from tests.support.wall_clock import assert_within

WAIT_S = 10.0
IN_CLEAR = TlsSettings()


def member(name: str, incarnation: int = 1, *, is_draining: bool = False) -> WorkerMember:
    return WorkerMember(
        worker_id=name,
        incarnation=incarnation,
        address=f"{name}:1",
        pool="decode" if name.startswith("decode") else "prefill",
        is_draining=is_draining,
    )


class Listener:
    """A router's feed, and what it was told."""

    def __init__(
        self,
        name: str,
        address: str,
        secret: ClusterSecret = SECRET,
        tls: TlsSettings = IN_CLEAR,
    ) -> None:
        self.address = address
        self.told: list[list[tuple[str, int, bool]]] = []
        self.news = asyncio.Event()
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.num_searches = 0  # for the controller
        credentials = ClusterCredentials(secret.keys_of("router", name), 7)
        self.feed = MemberFeed(
            router_id=name,
            find_controller=self.find,
            connect_controller=partial(process.connect_controller, credentials, ClusterLinks(tls)),
            take=self.take,
        )
        self.task = asyncio.create_task(self.feed.run())

    async def wait_searched(self, num_searches: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.num_searches < num_searches:
                await asyncio.sleep(0.01)

    async def find(self) -> str:
        self.num_searches += 1
        if not self.address:
            raise ControllerGone("nobody knows")
        return self.address

    async def take(self, members: Any) -> None:
        await self.may_take.wait()
        self.versions = [m.contract_version for m in members]
        self.told.append([(m.worker_id, m.incarnation, m.is_draining) for m in members])
        self.news.set()

    async def wait_told(self, *members: tuple[str, int, bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.told or self.told[-1] != list(members):
                self.news.clear()
                await self.news.wait()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def serving(
    port: int = 0, tls: TlsSettings = IN_CLEAR
) -> AsyncIterator[tuple[MemberServer, str]]:
    door = ClusterLinks(tls).door
    keys = SECRET.keys_of("controller", CONTROLLER_PARTY_NAME)
    server = MemberServer(keys, "127.0.0.1", port, door)
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_feed, "RETRY_S", 0.05)


@pytest.mark.parametrize("start_s", [0.0, WAIT_S])
def test_a_controller_counts_as_lost_once_it_was_followed_or_is_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start_s: float
) -> None:
    monkeypatch.setattr(member_feed, "START_S", start_s)

    async def losses_after(listener: Listener, num_searches: int) -> int:
        await listener.wait_searched(listener.num_searches + num_searches)
        return [each.getMessage() for each in caplog.records].count("controller_lost")

    async def main() -> None:
        listener = Listener("router-0", "")
        assert await losses_after(listener, 3) == (0 if start_s else 1)
        async with serving() as (server, listener.address):
            server.publish([member("decode-0")])
            await listener.wait_told(("decode-0", 1, False))
            before = await losses_after(listener, 0)
        listener.address = ""
        assert await losses_after(listener, 3) > before
        await listener.stop()

    asyncio.run(main())


def test_a_refused_call_tells_at_once_which_start_of_the_controller_to_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """grpc.aio hides why a call has ended from a write that comes just then."""
    monkeypatch.setattr(member_feed, "RETRY_S", 2 * WAIT_S)

    def watch_members(channel: grpc.aio.Channel) -> Any:
        call = controller_pb2_grpc.ControllerServiceStub(channel).WatchMembers()  # type: ignore[no-untyped-call]
        write = call.write

        async def write_late(message: Any) -> None:
            headers = await call.initial_metadata()
            if not headers:  # it is refused
                nothing = grpc.aio.Metadata()
                internal = grpc.StatusCode.INTERNAL
                raise grpc.aio.AioRpcError(internal, nothing, nothing, "Internal error from Core")
            await write(message)

        call.write = write_late
        return call

    async def main() -> None:
        async with serving() as (server, address):
            server.publish([member("decode-0")])
            listener = Listener("router-0", address)
            await listener.wait_told(("decode-0", 1, False))
            await listener.stop()

    monkeypatch.setattr(wire, "watch_members", watch_members)
    asyncio.run(main())


def test_who_waits_for_a_controller_is_told_once_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported_wait, "PATIENCE_S", 0.5)

    async def main() -> None:
        said: list[str] = []
        late = Listener("router-0", "")
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        waiting = asyncio.create_task(late.feed.wait_followed(said.append))
        await until(lambda: said)
        assert loop.time() - began_at >= reported_wait.PATIENCE_S, "a first attempt may fail"
        monkeypatch.setattr(reported_wait, "PATIENCE_S", WAIT_S)
        late.address = "127.0.0.1:1"  # another reason
        await late.wait_searched(late.num_searches + 2)
        assert (said, waiting.done()) == (["nobody knows"], False)
        async with serving() as (server, late.address):
            server.publish([])
            early = Listener("router-1", late.address)
            async with asyncio.timeout(WAIT_S):
                await waiting
                await early.feed.wait_followed(said.append)
            assert said == ["nobody knows"]
            for each in (late, early):
                assert each.told == [[]]
                await each.stop()

    asyncio.run(main())


async def _reason_to_wait(address: str, secret: ClusterSecret) -> str:
    listener = Listener("router-0", address, secret)
    told = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(listener.feed.wait_followed(told.set_result))
    try:
        return await asyncio.wait_for(told, WAIT_S)
    finally:
        waiting.cancel()
        await listener.stop()


def test_who_waits_with_wrong_options_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported_wait, "PATIENCE_S", 1.0)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def main() -> None:
        no_controller = grpc.aio.server()
        port = no_controller.add_insecure_port("127.0.0.1:0")
        await no_controller.start()
        async with serving() as (server, address):
            server.publish([])
            keys = await _reason_to_wait(address, ClusterSecret(b"o" * 32))
        reasons = [await _reason_to_wait(f"127.0.0.1:{port}", SECRET)]
        await no_controller.stop(None)
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as http:
            port = http.sockets[0].getsockname()[1]
            reasons.append(await _reason_to_wait(f"127.0.0.1:{port}", SECRET))

        assert keys.startswith("--keys: found keys that it does not accept; allowed: ")
        assert keys.endswith(", which `pagewire router-keys` writes")
        for reason in reasons:
            assert reason.startswith("--controller: found a router or another server; allowed: ")
            assert reason.endswith(", see controller_port")

    asyncio.run(main())


def test_a_feed_ends_though_its_cancellation_comes_as_the_end_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def end_of_a_call(_: Listener) -> str:
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            raise ControllerGone("the call was cancelled") from None
        return ""

    async def main() -> None:
        monkeypatch.setattr(Listener, "find", end_of_a_call)
        listener = Listener("router-0", "")
        await asyncio.sleep(0)
        listener.task.cancel()
        done, _ = await asyncio.wait([listener.task], timeout=1)
        listener.task.cancel()
        assert done

    asyncio.run(main())


def test_routers_are_told_all_at_once_and_again_at_each_change() -> None:
    async def main() -> None:
        async with serving() as (server, address):
            server.publish([member("decode-0"), member("prefill-0", 5)])
            listeners = [Listener(f"router-{index}", address) for index in range(3)]
            for each in listeners:
                await each.wait_told(("decode-0", 1, False), ("prefill-0", 5, False))

            server.publish([member("decode-0", is_draining=True)])
            await server.wait_applied(WAIT_S)

            for each in listeners:
                assert each.told[-1] == [("decode-0", 1, True)]
            num_told = [len(each.told) for each in listeners]

            server.publish([member("decode-0", is_draining=True)])
            await asyncio.sleep(0.2)

            assert [len(each.told) for each in listeners] == num_told, "nothing was new"
            for each in listeners:
                await each.stop()

    asyncio.run(main())


def test_a_wait_for_routers_includes_slow_ones_ends_in_time_and_forgets_dead_ones() -> None:
    async def main() -> None:
        async with serving() as (server, address):
            quick, slow = Listener("router-0", address), Listener("router-1", address)
            for each in (quick, slow):
                await each.wait_told()
            loop = asyncio.get_running_loop()

            slow.may_take.clear()
            server.publish([member("decode-0")])
            loop.call_later(0.2, slow.may_take.set)
            await server.wait_applied(WAIT_S)
            assert slow.told[-1] == [("decode-0", 1, False)]

            slow.may_take.clear()
            server.publish([])
            began_at = loop.time()
            await server.wait_applied(0.1)
            assert slow.told[-1] == [("decode-0", 1, False)], "time was up before"
            assert_within(loop.time() - began_at, WAIT_S / 2)
            slow.may_take.set()

            server.publish([member("decode-1")])
            await slow.stop()
            began_at = loop.time()
            await server.wait_applied(WAIT_S)
            assert_within(loop.time() - began_at, 5.0)
            await quick.stop()

    asyncio.run(main())


def test_a_controller_that_is_started_again_is_found_whatever_its_incarnation() -> None:
    async def main() -> None:
        async with serving() as (server, address):
            port = int(address.rpartition(":")[2])
            server.publish([member("decode-0")])
            listener = Listener("router-0", address)
            await listener.wait_told(("decode-0", 1, False))
        first = listener.feed._incarnation
        async with serving(port) as (server, _):
            server.publish([member("decode-0", 2)])
            await listener.wait_told(("decode-0", 2, False))
            assert listener.feed._incarnation != first
        listener.address = ""  # nobody knows where it is
        await asyncio.sleep(0.2)
        async with serving() as (server, listener.address):
            server.publish([member("decode-1")])
            await listener.wait_told(("decode-1", 1, False))
            await listener.stop()

    asyncio.run(main())


def test_a_controller_that_falls_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_feed, "SILENT_S", 0.3)

    async def main() -> None:
        async with serving() as (server, address):
            server.publish([member("decode-0")])
            listener = Listener("router-0", address)
            await listener.wait_told(("decode-0", 1, False))
            num_told = len(listener.told)
            assert listener.feed.silence == ""
            listener.address = ""  # it repeats itself only once in a second
            await until(lambda: listener.feed.silence == "nobody knows")
            listener.address = address
            await until(lambda: listener.feed.silence == "")
            assert len(listener.told) > num_told, "it asked again, and was told all"
            await listener.stop()

    asyncio.run(main())


def test_contract_versions_are_told_both_ways_and_nobody_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with serving() as (server, address):
            server.publish([replace(member("decode-0"), contract_version=7)])
            listener = Listener("router-0", address)
            await listener.wait_told(("decode-0", 1, False))
            assert listener.versions == [7]
            await server.wait_applied(WAIT_S)
            await listener.stop()

    asyncio.run(main())
    [watches] = [vars(each)[ATTRIBUTE] for each in caplog.records if each.msg == "router_watches"]
    assert watches == {"router_id": "router-0", "contract_version": CONTRACT_VERSION}


def test_nobody_is_told_without_a_routers_key() -> None:
    async def main() -> None:
        async with serving() as (server, address):
            server.publish([member("decode-0")])
            stranger = Listener("router-0", address, ClusterSecret(b"o" * 32))
            async with grpc.aio.insecure_channel(address) as channel:
                for method in CONTROLLER_CALLERS:
                    call = channel.stream_stream(method)()
                    with suppress(grpc.aio.AioRpcError):  # it may be refused by now
                        await call.write(b"")
                    assert (await call.code()).name == "UNAUTHENTICATED", method
            decode = SECRET.keys_of("decode", "decode-0")
            assert "controller" not in decode.calling
            await asyncio.sleep(0.3)
            assert stranger.told == []
            await stranger.stop()

    asyncio.run(main())


def test_a_router_believes_no_other_process_at_the_controllers_address() -> None:
    async def main() -> None:
        server = grpc.aio.server()
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(Liar(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        listener = Listener("router-0", f"127.0.0.1:{port}")
        await asyncio.sleep(0.3)
        assert listener.told == []
        await listener.stop()
        await server.stop(None)

    asyncio.run(main())


class Liar(controller_pb2_grpc.ControllerServiceServicer):
    async def WatchMembers(self, requests: Any, context: Any) -> Any:  # noqa: N802
        yield controller_pb2.WatchMembersResponse(version=5)
        await asyncio.sleep(60)


def test_over_tls_a_router_needs_the_clusters_certificate_and_its_keys(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    inside = TlsSettings(inside=authority.inside())

    async def main() -> None:
        async with serving(tls=inside) as (server, address):
            server.publish([member("decode-0")])
            router = Listener("router-0", address, tls=inside)
            strangers = [
                Listener("router-1", address),
                Listener("router-2", address, tls=TlsSettings(inside=other.inside())),
                Listener("router-3", address, ClusterSecret(b"o" * 32), tls=inside),
            ]

            await router.wait_told(("decode-0", 1, False))
            server.publish([member("decode-0", is_draining=True)])
            await router.wait_told(("decode-0", 1, True))

            assert [each.told for each in strangers] == [[], [], []]
            for each in (router, *strangers):
                await each.stop()

    asyncio.run(main())
