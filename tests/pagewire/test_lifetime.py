"""What becomes of calls when streams are left, clients closed, threads many, processes forked."""

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagewire import AsyncClient, Client, ClosedError, ServerError
from pagewire.calls import FINISH_S
from tests.pagewire.scripted_service import (
    ScriptedService,
    never_ends,
    response,
    run,
    serving_in_thread,
    two_deltas,
)
from tests.support.waiting import wait_until
from tests.support.wall_clock import assert_within

WAIT_S = 10


def run_program(source, *arguments):
    """Run a user's program; return its output after checking that it left nothing on stderr."""
    result = subprocess.run(
        [sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=30
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


async def echo(request, context):
    yield response(request.text, [1])


def test_a_stream_that_its_reader_cancels_just_ends():
    async def work(client, service):
        async with client.stream("x") as stream:
            texts = []
            async for delta in stream:
                texts.append(delta.text)
                stream.cancel()
            stream.cancel()
        return texts, [delta async for delta in stream]

    assert run(never_ends, work) == (["a"], [])


def test_a_stream_that_another_task_cancels_ends_for_its_waiting_reader():
    async def work(client, service):
        async with client.stream("x") as stream:
            assert (await anext(stream)).text == "a"
            asyncio.get_running_loop().call_later(0.05, stream.cancel)
            return [delta async for delta in stream]

    assert run(never_ends, work) == []


def test_a_second_reader_of_a_stream_is_refused_while_the_first_one_waits():
    async def work(client, service):
        async with client.stream("x") as stream:
            assert (await anext(stream)).text == "a"
            first = asyncio.create_task(anext(stream, None))
            await asyncio.sleep(0.05)
            with pytest.raises(RuntimeError, match="stream: found a second reader"):
                await asyncio.wait_for(anext(stream), WAIT_S)
            stream.cancel()
            return await asyncio.wait_for(first, WAIT_S)

    assert run(never_ends, work) is None


def test_closing_the_client_ends_its_calls_with_closed_error():
    async def work(client, service):
        stream = client.stream("x")
        assert (await anext(stream)).text == "a"
        calls = [asyncio.create_task(client.generate("x")) for _ in range(3)]
        while len(service.requests) < 4:
            await asyncio.sleep(0.01)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)

        await client.aclose()

        for each in [*calls, reader]:
            with pytest.raises(ClosedError):
                await asyncio.wait_for(each, WAIT_S)

    run(never_ends, work)


def test_closing_the_client_ends_its_short_calls_too(monkeypatch):
    async def hang(self, request, context):
        self.requests.append(request)
        await asyncio.sleep(60)

    async def work(client, service):
        call = asyncio.create_task(client.tokenize("x"))
        while not service.requests:
            await asyncio.sleep(0.01)
        await client.aclose()
        with pytest.raises(ClosedError):
            await asyncio.wait_for(call, WAIT_S)

    monkeypatch.setattr(ScriptedService, "Tokenize", hang)
    run(never_ends, work)


def test_an_idle_stream_of_a_closed_client_raises_closed_error():
    async def work(client, service):
        stream = client.stream("x")
        assert (await anext(stream)).text == "a"
        await client.aclose()
        with pytest.raises(ClosedError):
            await asyncio.wait_for(anext(stream), WAIT_S)
        stream.cancel()

    run(never_ends, work)


def test_a_closed_client_raises_closed_error_for_each_method():
    async def work(client, service):
        await client.aclose()
        await client.aclose()
        for call in (
            *(lambda: client.generate("x"), lambda: client.tokenize("x")),
            *(client.list_models, client.status),
        ):
            with pytest.raises(ClosedError):
                await call()
        with pytest.raises(ClosedError):
            client.stream("x")

    run(two_deltas, work)


def test_cancelling_a_call_of_a_closed_client_is_still_a_cancellation():
    async def work(client, service):
        call = asyncio.create_task(client.generate("x"))
        while not service.requests:
            await asyncio.sleep(0.01)
        call.cancel()
        closing = asyncio.create_task(client.aclose())
        with pytest.raises(asyncio.CancelledError):
            await call
        await closing

    run(never_ends, work)


def test_a_client_of_another_event_loop_says_so():
    client = AsyncClient("127.0.0.1:1", channel_factory=lambda address: _Channel())
    asyncio.run(_open(client))

    with pytest.raises(ClosedError, match="another event loop"):
        asyncio.run(_open(client))
    asyncio.run(client.aclose())


def test_a_stream_of_another_event_loop_says_so():
    client = AsyncClient("127.0.0.1:1", channel_factory=lambda address: _Channel())

    async def begin():
        return client.stream("x")

    stream = asyncio.run(begin())
    with pytest.raises(ClosedError, match="stream belongs to another event loop"):
        asyncio.run(asyncio.wait_for(anext(stream), WAIT_S))


class _Channel:
    def unary_unary(self, *arguments, **options):
        return lambda request, **options: asyncio.sleep(0)

    def unary_stream(self, *arguments, **options):
        return lambda request, **options: None

    def stream_stream(self, *arguments, **options):
        return _SilentCall


class _SilentCall:
    def __init__(self, **options):
        pass

    async def initial_metadata(self):
        return ()

    async def read(self):
        await asyncio.sleep(60)

    async def write(self, message):
        pass

    def cancel(self):
        pass


async def _open(client):
    client.stream("x")


def test_many_threads_share_one_sync_client():
    with (
        serving_in_thread(echo) as (address, _),
        Client(address) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        texts = list(pool.map(lambda i: client.generate(f"x{i}").text, range(64)))

    assert texts == [f"x{i}" for i in range(64)]


def test_a_sync_client_may_be_used_inside_an_event_loop():
    async def scenario():
        with Client(address) as client:
            return client.generate("x").text

    with serving_in_thread(echo) as (address, _):
        assert asyncio.run(scenario()) == "x"


def test_closing_a_sync_client_ends_the_calls_of_other_threads_with_closed_error():
    with serving_in_thread(never_ends) as (address, service):
        client = Client(address)
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(client.generate, "x") for _ in range(4)]
            wait_until(lambda: len(service.requests) == 4)

            client.close()

            assert all(isinstance(each.exception(WAIT_S), ClosedError) for each in calls)
        client.close()
        with pytest.raises(ClosedError):
            client.status()
        with pytest.raises(ClosedError):
            client.stream("x")


def test_a_sync_stream_that_was_cancelled_just_ends_also_after_its_client():
    with serving_in_thread(never_ends) as (address, _):
        with Client(address) as client, client.stream("x") as stream:
            assert next(stream).text == "a"
            timer = threading.Timer(0.05, stream.cancel)
            timer.start()
            assert list(stream) == []
        assert list(stream) == []
        stream.cancel()


def test_a_sync_stream_of_a_closed_client_raises_closed_error():
    with serving_in_thread(never_ends) as (address, _):
        client = Client(address)
        with client.stream("x") as stream:
            next(stream)
            client.close()
            with pytest.raises(ClosedError):
                next(stream)


def test_sync_clients_share_one_thread_and_close_without_noise():
    source = (
        "import sys, threading; from pagewire import Client\n"
        "for _ in range(20):\n"
        "    with Client(sys.argv[1]) as client:\n"
        "        with client.stream('x') as stream: next(stream)\n"
        "        left_open = client.stream('x')\n"
        "print([each.name for each in threading.enumerate()].count('pagewire-client'))\n"
    )
    with serving_in_thread(never_ends) as (address, _):
        assert run_program(source, address) == "1\n"


def test_event_loops_one_after_the_other_hear_nothing_of_calls_of_an_earlier_one():
    source = (
        "import asyncio, gc, sys; from pagewire import AsyncClient\n"
        "gc.disable()\n"  # what is left of calls keeps gRPC's queue for the next loop
        "async def main():\n"
        "    async with AsyncClient(sys.argv[1]) as client:\n"
        "        async with client.stream('x') as stream: await anext(stream)\n"
        "        running = client.stream('x')\n"
        "        await anext(running)\n"
        "for _ in range(60): asyncio.run(main())\n"
    )
    with serving_in_thread(never_ends) as (address, _):
        assert run_program(source, address) == ""


def test_closing_tells_the_router_which_calls_end_and_waits_for_its_end():
    async def work(client, service):
        stream = client.stream("x")
        await anext(stream)
        await client.aclose()
        assert service.cancelled.is_set()
        assert service.num_ended_streams == 1

    run(never_ends, work)


def test_closing_waits_for_the_end_of_a_stream_that_the_router_has_not_yet_answered():
    async def work(client, service):
        service.headers_s = 0.2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.generate("x")
        await client.aclose()
        assert service.num_ended_streams == 1

    run(never_ends, work)


def test_closing_waits_for_a_moment_only_for_a_router_that_does_not_end_its_streams():
    async def work(client, service):
        service.ends_streams = False
        await client.generate("x")
        began = time.monotonic()
        await client.aclose()
        return time.monotonic() - began

    seconds = run(two_deltas, work)
    assert seconds >= FINISH_S
    assert_within(seconds, FINISH_S + 1)


def test_cancelling_the_close_of_a_client_still_closes_it():
    async def work(client, service):
        service.ends_streams = False
        stream = client.stream("x")
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.aclose()
        async with asyncio.timeout(WAIT_S):
            while not service.num_ended_streams:
                await asyncio.sleep(0.01)

    run(never_ends, work)


@pytest.mark.parametrize("leaves_stream_open", [False, True])
def test_a_program_that_forgets_to_close_ends_without_noise(leaves_stream_open):
    source = (
        "import sys; from pagewire import Client\n"
        "client = Client(sys.argv[1])\n"
        "print(client.generate('x').text)\n"
        f"stream = client.stream('y') if {leaves_stream_open} else None\n"
        "print(next(stream).text if stream else 'y')\n"
    )
    with serving_in_thread(echo) as (address, _):
        assert run_program(source, address) == "x\ny\n"


FORK = """
import os, sys
from pagewire import Client, ClosedError
client = Client(sys.argv[1])
print(client.generate("parent").text, flush=True)
child = os.fork()
if child == 0:
    for other in (client, Client(sys.argv[1])):
        try:
            other.generate("x", timeout_s=5)
        except ClosedError as error:
            print("fork" in str(error), flush=True)
    client.close()
    os._exit(0)
os.waitpid(child, 0)
print(client.generate("parent again").text)
client.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
class InterruptAt:
    """Traces a thread, and raises KeyboardInterrupt at one of the lines that it comes to."""

    def __init__(self, line):
        self.lines_left = line

    def __call__(self, frame, event, arg):
        if frame.f_code.co_name == "_shared_loop":
            return None  # it leaves a `with` in a line of its own, where no signal can come between
        if event == "line":
            self.lines_left -= 1
            if self.lines_left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.fixture
def no_collection():
    """Keep finalizers of other tests' objects out of the traced lines."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_an_interrupt_at_any_line_of_a_call_leaves_the_client_whole(recwarn):
    with serving_in_thread(two_deltas) as (address, _), Client(address) as client:
        status = client.status(timeout_s=WAIT_S)
        for line in itertools.count(1):
            sys.settrace(interrupt := InterruptAt(line))
            try:
                client.status(timeout_s=WAIT_S)
            except KeyboardInterrupt:
                assert client.status(timeout_s=WAIT_S) == status
            finally:
                sys.settrace(None)
            if interrupt.lines_left:
                break

    assert line > 10
    assert [str(each.message) for each in recwarn] == []


def test_a_forked_process_is_told_instead_of_hanging():
    with serving_in_thread(echo) as (address, _):
        result = subprocess.run(
            [sys.executable, "-c", FORK, address], capture_output=True, text=True, timeout=30
        )

    assert result.stdout == "parent\nTrue\nTrue\nparent again\n"


FORK_WHILE_IT_STREAMS = """
import os, sys, time, warnings
from pagewire import Client
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, since Python 3.12
client = Client(sys.argv[1])
with client.stream("x") as stream:
    next(stream)
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            time.sleep(0.3)
            os._exit(0)
        children.append(child)
    print([os.waitpid(child, 0)[1] for child in children])
client.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_processes_that_are_forked_beside_an_open_stream_live():
    with serving_in_thread(never_ends) as (address, _):
        assert run_program(FORK_WHILE_IT_STREAMS, address) == f"{[0] * 8}\n"


def test_a_process_may_fork_before_its_first_call():
    source = (
        "import os, sys; from pagewire import Client\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0)\n"  # or their lines would mix
        "with Client(sys.argv[1]) as client: print(client.generate('x').text, flush=True)\n"
    )
    with serving_in_thread(echo) as (address, _):
        assert run_program(source, address) == "x\nx\n"


def test_a_failed_call_is_not_repeated():
    async def work(client, service):
        with pytest.raises(ServerError):
            await client.generate("x")
        return len(service.requests)

    async def crash(request, context):
        raise RuntimeError("broken")
        yield

    assert run(crash, work) == 1
