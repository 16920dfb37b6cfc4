"""A real device under the decode worker's step loop: late, out of memory, and with others' pages.

Tokens are those of the same requests where each step is read before the next is launched.
"""

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attn_kernels.seats.bodies import TOKEN
from attn_kernels.tiles import PlanBuffer
from decode_worker.request import PrefillGroup, Request
from decode_worker.scheduler import Scheduler
from decode_worker.step_plan import StepPlan
from kv_cache.page_pool import PagePool, PageState
from kv_cache.torch_storage import TorchPageStorage
from kv_transfer.cuda_ipc import CudaIpcTransport
from kv_transfer.cuda_ipc_memory import CudaMemory, CudaPeerPages
from kv_transfer.proven_sockets import ProvenSockets
from kv_transfer.transport import Connection
from llm_engine import device_runner, sampler
from llm_engine.device_runner import DeviceRunner
from llm_engine.engine import Engine
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.load_engine import load_engine
from llm_engine.sampling import SampledToken, SamplingParams, SequenceSlice
from tests.decode_worker.serving import Serving, request_of
from tests.llm_engine.driver import runner_of
from tests.support.checkpoints import write_checkpoint
from worker.errors import PassFailed
from worker.identity import WorkerIdentity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),  # with the compilation of the engine's kernels
]

VOCAB_SIZE = 211
INTERMEDIATE_SIZE = 16384  # with a long prompt, hundreds of MiB
LONG_PROMPT = 8200
MAX_TOKENS = 128
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
KINDS = [
    GREEDY,
    replace(GREEDY, temperature=0.9),
    replace(GREEDY, temperature=1.2, top_k=40, repetition_penalty=1.2),
    replace(GREEDY, temperature=0.7, top_p=0.9, logprobs=2),
]
NUM_PAGES = 64  # of which the sequences at times want more
CYCLES_PER_S = 1_900_000_000  # about; of torch.cuda._sleep
PREFILL = WorkerIdentity(worker_id="prefill-0", incarnation=1, address="")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(
        folder,
        "llama",
        seed=3,
        dtype=torch.bfloat16,
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=INTERMEDIATE_SIZE,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=16384,
    )
    return load_engine(folder, page_size=16, num_pages=1200, device="cuda", num_seats=16)


def same_as(own: Engine, kind: type[Engine] = Engine) -> Any:
    """Return an engine of another class over the same pages and seats."""
    return kind(own.config, own.storage, own.decoder, own._runner)


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


@dataclass(kw_only=True, slots=True)
class Asked:
    """A request, and the tokens of its choices."""

    prompt: list[int]
    params: SamplingParams
    num_choices: int
    expected: list[list[int]]

    def request(self, salt: bytes) -> Request:
        return request_of(self.prompt, self.params, n=self.num_choices, salt=salt)

    def stopping_at(self, token: int) -> "Asked":
        """Return the request that stops at a token."""
        expected = [
            tokens[: tokens.index(token) + 1] if token in tokens else tokens
            for tokens in self.expected
        ]
        params = replace(self.params, stop_token_ids=(token,))
        return replace(self, params=params, expected=expected)


def answers_one_step_at_a_time(engine: Engine, *requests: Request) -> list[list[list[int]]]:
    """Return the tokens of requests that share steps, each of which is read before the next."""
    serving = Serving(same_as(engine), max_step_tokens=16384)

    async def scenario() -> list[list[list[int]]]:
        return await asyncio.gather(*map(serving.ask, requests))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRunner, "max_launched", 1)
        answers = serving.run(scenario())
    assert serving.loop.num_steps_ahead == 0
    serving.check_idle()
    return answers


def random_requests(engine: Engine, count: int) -> list[Asked]:
    """Return requests of all kinds; some share a prefix, half of them stop before their length."""
    rng = random.Random(11)
    prefix = random_prompt(rng, 48)
    asked = [
        Asked(
            prompt=prefix * (index % 3 == 0) + random_prompt(rng, rng.randint(1, 70)),
            params=replace(
                KINDS[index % len(KINDS)], seed=index, max_tokens=rng.randint(8, MAX_TOKENS)
            ),
            num_choices=1 + (index % 5 == 0) * rng.randint(1, 2),
            expected=[],
        )
        for index in range(count)
    ]
    answers = answers_one_step_at_a_time(engine, *(each.request(b"") for each in asked))
    for each, answer in zip(asked, answers, strict=True):
        each.expected = answer
    return [
        each.stopping_at(rng.choice(each.expected[0])) if index % 2 else each
        for index, each in enumerate(asked)
    ]


class Lateness:
    """Makes the device and the host wait at random."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # of the engine's thread

    def of_device(self) -> None:
        if self._rng.random() < 0.3:
            torch.cuda._sleep(1 + int(self._rng.expovariate(1 / 0.0005) * CYCLES_PER_S))

    def of_host(self) -> None:
        if self._rng.random() < 0.2:
            time.sleep(self._rng.expovariate(1 / 0.0005))

    def before(self, right: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that has the device wait first."""

        def late(*args: Any, **options: Any) -> Any:
            self.of_device()
            return right(*args, **options)

        return late


class LateEngine(Engine):
    """Launches into the queue of a device that is late, from a host that is late."""

    lateness: Lateness

    def launch(self, step: EngineStep) -> None:
        self.lateness.of_host()
        self.lateness.of_device()  # before anything of the step is sent
        super().launch(step)
        self.lateness.of_device()  # before the next one

    def read(self) -> StepResult:
        self.lateness.of_host()
        return super().read()


@pytest.fixture
def lateness(monkeypatch: pytest.MonkeyPatch) -> Lateness:
    """What late engines are to have; it also comes within their steps."""
    late = Lateness(1)
    for module in (device_runner, sampler):  # between the pass and the copy of its tokens
        monkeypatch.setattr(module, "read_later", late.before(module.read_later))
    monkeypatch.setattr(DeviceRunner, "_record_event", late.before(DeviceRunner._record_event))
    return late


async def ask_again_and_again(
    serving: Serving, asked: list[Asked], *, num_steps: int, seconds: float
) -> int:
    """Ask from many sides, and cancel some; return how many were asked."""
    until = asyncio.get_running_loop().time() + seconds
    num_asked = 0

    async def ask(rng: random.Random) -> None:
        nonlocal num_asked
        while serving.loop.num_steps < num_steps and asyncio.get_running_loop().time() < until:
            num_asked += 1
            each = rng.choice(asked)
            # Some find what others have computed, others find nothing.
            request = each.request(rng.choice([b"", str(num_asked).encode()]))
            if rng.random() < 0.25:
                found = await serving.ask(request, cancel_after=rng.randint(1, 20))
                expected = [
                    tokens[: len(own)] for tokens, own in zip(each.expected, found, strict=True)
                ]
            else:
                found, expected = await serving.ask(request), each.expected
            assert found == expected, f"the {num_asked}th request, {each}"

    await asyncio.gather(*(ask(random.Random(seed)) for seed in range(24)))
    return num_asked


def test_tokens_do_not_depend_on_when_host_and_device_get_to_their_work(
    engine: Engine, lateness: Lateness
) -> None:
    asked = random_requests(engine, 30)
    late: LateEngine = same_as(engine, LateEngine)
    late.lateness = lateness
    serving = Serving(late, num_pages=NUM_PAGES)

    num_asked = serving.run(ask_again_and_again(serving, asked, num_steps=3000, seconds=8.0))

    serving.check_idle()
    assert num_asked > 100
    assert serving.loop.num_steps > 500
    assert serving.loop.num_steps_ahead > serving.loop.num_steps // 2
    assert serving.scheduler.totals.preemptions > 0
    assert serving.scheduler.totals.cached_tokens > 0


class OverwritingEngine(LateEngine):
    """Overwrites what no step may read any more.

    Plans on the host when their step is read, and the last token of a seat when its sequence ends.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.num_overwritten = 0  # plans
        self._num_launched = self._num_read = 0
        self._senders: dict[tuple[PlanBuffer, int], int] = {}  # |-> the last launch that sent it

    def note_sending(self, buffer: PlanBuffer) -> None:
        self._senders[buffer, buffer._turn] = self._num_launched

    def launch(self, step: EngineStep) -> None:
        batch = runner_of(self)._batch
        assert batch is not None
        with torch.inference_mode():
            for seat in step.ended:  # a list of them would wait for the device
                batch.seats.state[seat, TOKEN.value].fill_(-1)
        super().launch(step)
        self._num_launched += 1

    def read(self) -> StepResult:
        result = super().read()
        over = [key for key, sender in self._senders.items() if sender == self._num_read]
        with torch.inference_mode():
            for buffer, turn in over:
                del self._senders[buffer, turn]
                buffer._host_buffers[turn].fill_(-1)
        self.num_overwritten += len(over)
        self._num_read += 1
        return result


class OverwritingServing(Serving):
    """Fills pages with NaN as soon as they are free, whatever step still runs."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, **options: Any) -> None:
        super().__init__(engine, **options)
        self.num_overwritten = 0  # pages
        self._pages = engine.storage.pages
        self._freed: set[int] = set()
        # Of another priority than the stream of recordings: torch gives streams out again.
        self._stream: Any = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        settle = PagePool._settle

        def settled(pool: PagePool, page_id: int) -> None:
            settle(pool, page_id)
            if pool.state(page_id) is PageState.FREE:
                self._freed.add(page_id)

        patch.setattr(PagePool, "_settle", settled)

    def before_step(self) -> None:
        # Some may have another owner by now, but none whose step is launched.
        with torch.cuda.stream(self._stream):
            for page_id in self._freed:
                self._pages[page_id].fill_(torch.nan)
        self._stream.synchronize()
        self.num_overwritten += len(self._freed)
        self._freed.clear()


def test_no_step_reads_plans_seats_and_pages_of_what_has_ended(
    engine: Engine, lateness: Lateness, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = random_requests(engine, 30)
    overwriting: OverwritingEngine = same_as(engine, OverwritingEngine)
    overwriting.lateness = lateness
    send = PlanBuffer.send

    def noted(buffer: PlanBuffer, used: int) -> None:
        overwriting.note_sending(buffer)
        send(buffer, used)

    monkeypatch.setattr(PlanBuffer, "send", noted)
    serving = OverwritingServing(overwriting, monkeypatch, num_pages=NUM_PAGES)
    engine.storage.pages.fill_(torch.nan)

    serving.run(ask_again_and_again(serving, asked, num_steps=1500, seconds=8.0))

    serving.check_idle()
    assert serving.loop.num_steps_ahead > serving.loop.num_steps // 2
    assert overwriting.num_overwritten > serving.loop.num_steps // 2
    assert serving.num_overwritten > 200


class DelayingEngine(Engine):
    """Delays one step by a second.

    Attributes:
        num_before: Steps that decode before the delayed one.
        begins, ends: Events of the delayed step.
        written_page: The page of its only row.
    """

    num_before: int
    begins: Any
    ends: Any
    written_page: int

    def launch(self, step: EngineStep) -> None:
        self.num_before -= bool(step.decodes)
        if not step.decodes or self.num_before != -1:
            super().launch(step)
            return
        torch.cuda._sleep(CYCLES_PER_S)
        self.begins = event_now()
        super().launch(step)
        self.ends = event_now()
        [seat], batch = step.decodes, runner_of(self)._batch
        assert batch is not None
        position = batch.lengths[seat] - 2  # the last one is that of the token that it draws
        self.written_page = int(batch.page_table[seat, position // self.layout.page_size])


def event_now() -> Any:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class OwnMemory(CudaMemory):
    """Maps pages of its own process, for which CUDA has no handle."""

    def __init__(self, storage: TorchPageStorage, source: TorchPageStorage) -> None:
        super().__init__(storage)
        self._source = source

    def open(self, card: bytes, num_pages: int) -> CudaPeerPages:
        return OwnPages(self, self._source.pages.data_ptr(), 0, num_pages, is_same_gpu=True)


class OwnPages(CudaPeerPages):
    def close(self) -> None:
        self._memory.streams.give_back(self._stream)


@asynccontextmanager
async def connected(
    source: TorchPageStorage, target: TorchPageStorage
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect two storages of this GPU; yields the sender's side and the receiver's."""
    sender = CudaIpcTransport(source, ProvenSockets(host="127.0.0.1"))
    memory = OwnMemory(target, source)
    receiver = CudaIpcTransport(target, ProvenSockets(host="127.0.0.1"), memory=memory)
    try:
        key, deadline = bytes(32), asyncio.get_running_loop().time() + 30
        offer = receiver.offer("c0", key)
        receiving, sending = await asyncio.gather(
            receiver.accept("c0", deadline), sender.connect("c0", offer, key, deadline)
        )
        yield sending, receiving
    finally:
        await sender.close()
        await receiver.close()


class Receiving(Serving):
    """Has prompts sent from pages in which they are computed, as a prefill worker would.

    Attributes:
        arrived: The pages that were written, and what they hold when no step runs any more.
        came_early: Whether they had arrived before the delayed step began.
    """

    def __init__(self, engine: DelayingEngine, source: TorchPageStorage, first_token: int) -> None:
        super().__init__(engine, max_running_sequences=1)
        self.arrived: asyncio.Future[tuple[list[int], list[bytes]]] | None = None
        self.came_early = False
        self.connections: tuple[Connection, Connection] | None = None
        self._engine = engine
        self._source = source
        self._first_token = first_token

    def planned(self, plan: StepPlan) -> None:
        for group in plan.receives:
            self._receiving = asyncio.create_task(self._receive(group))

    async def move(self, page_ids: list[int]) -> None:
        """Receive the first pages of the source."""
        assert self.connections is not None
        sending, receiving = self.connections
        deadline = asyncio.get_running_loop().time() + 30
        await asyncio.gather(
            sending.send(range(len(page_ids)), deadline), receiving.receive(page_ids, deadline)
        )

    async def _receive(self, group: PrefillGroup) -> None:
        assert group.pages is not None
        assert self.arrived is not None
        page_ids = list(group.pages.page_ids)
        await self.move(page_ids)
        self.came_early = not self._engine.begins.query()
        await asyncio.to_thread(self._engine.ends.synchronize)
        self.arrived.set_result((page_ids, self._engine.storage.digest_pages(page_ids)))
        self.scheduler.receive_committed(group, len(page_ids))
        first = SampledToken(token_id=self._first_token)
        num_tokens = len(group.tokens)
        self.progressed(
            self.scheduler.receive_result(
                group, [first], num_cached_tokens=0, num_computed_tokens=num_tokens
            )
        )
        self.scheduler.receive_done(group, transfer_s=0.0, exposed_s=0.0)
        self.wake.set()


def frees_pages_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Free what has ended at once, although a launched step still writes behind its last token."""
    free_ended = Scheduler.free_ended

    def wrong(self: Scheduler) -> None:
        for choice in self._running:
            if choice.is_ended:
                choice.num_in_flight = 0
        free_ended(self)

    patch.setattr(Scheduler, "free_ended", wrong)


# Nothing may run beside it: the transfer must end while a step is delayed.
@pytest.mark.cluster
@pytest.mark.parametrize("is_planted", [False, True], ids=["right", "planted"])
def test_a_transfer_gets_the_page_of_a_superfluous_row_when_that_is_written_and_not_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    rng = random.Random(5)
    params = replace(GREEDY, temperature=1.5, max_tokens=12)
    prompt, next_prompt = random_prompt(rng, 20), random_prompt(rng, 48)
    [tokens], [next_tokens] = answers_one_step_at_a_time(
        engine, request_of(prompt, params), request_of(next_prompt, params)
    )
    last = next(i for i in range(2, len(tokens)) if tokens[i] not in tokens[:i])
    stopped = replace(params, stop_token_ids=(tokens[last],))
    source = TorchPageStorage(engine.layout, 3, engine.storage.device)
    computed = SequenceSlice(
        token_ids=next_prompt, start=0, page_ids=[0, 1, 2], num_prompt_tokens=len(next_prompt)
    )
    engine.forward([computed])
    source.pages.copy_(engine.storage.pages[:3])
    torch.cuda.synchronize()
    delaying: DelayingEngine = same_as(engine, DelayingEngine)
    delaying.num_before = last  # the first token is drawn with the prompt, the last by these
    serving = Receiving(delaying, source, next_tokens[0])
    if is_planted:
        frees_pages_in_flight(monkeypatch)

    async def scenario() -> tuple[list[int], list[bytes], list[list[int]]]:
        serving.arrived = asyncio.get_running_loop().create_future()
        async with connected(source, engine.storage) as serving.connections:
            num_pages = engine.storage.num_pages
            await serving.move([num_pages - 3, num_pages - 2, num_pages - 1])  # loads the kernel
            own = asyncio.create_task(serving.ask(request_of(prompt, stopped)))
            await asyncio.sleep(0)  # it comes first
            received = request_of(next_prompt, params, candidates=(PREFILL,))
            answer = asyncio.create_task(serving.ask(received))
            page_ids, digests = await serving.arrived
            assert await own == [tokens[: last + 1]]
            return page_ids, digests, [] if is_planted else await answer

    page_ids, digests, answer = serving.run(scenario())

    assert page_ids[0] == delaying.written_page, "the transfer should get it first"
    assert serving.came_early == is_planted
    sent = source.digest_pages(range(3))
    assert [own == right for own, right in zip(digests, sent, strict=True)] == (
        [not is_planted, True, True]
    )
    assert is_planted or answer == [next_tokens]


def take_all_memory_but(num_bytes: int) -> torch.Tensor:
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    return torch.empty(free_bytes - num_bytes, dtype=torch.uint8, device="cuda")


@pytest.mark.cluster  # nothing may run beside it, as the GPU has no memory left
def test_a_prompt_that_memory_does_not_suffice_for_ends_alone_and_is_computed_when_it_does(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(6)
    prompts = [random_prompt(rng, 20 + 7 * index) for index in range(6)]
    long_prompt = random_prompt(rng, LONG_PROMPT)

    def long_request() -> Request:
        return request_of(long_prompt, replace(GREEDY, max_tokens=4))

    def requests() -> list[Request]:
        kinds = [replace(KINDS[index % 2], seed=index, max_tokens=1000) for index in range(6)]
        return [request_of(*each) for each in zip(prompts, kinds, strict=True)]

    *expected, long_expected = answers_one_step_at_a_time(engine, *requests(), long_request())
    serving = Serving(same_as(engine), max_step_tokens=16384)
    num_left = 96 << 20
    assert 2 * num_left < 2 * LONG_PROMPT * INTERMEDIATE_SIZE  # bytes of a layer's widest result
    taken = [take_all_memory_but(num_left)]

    async def scenario() -> None:
        running = requests()
        answers = [asyncio.create_task(serving.ask(each)) for each in running]
        await asyncio.sleep(0)  # they are submitted
        while min(len(each.choices[0].output) for each in running) < 10:
            await asyncio.sleep(0.001)

        with pytest.raises(PassFailed):
            await serving.ask(long_request())

        assert not any(each.is_ended for each in running), "they have not decoded meanwhile"
        assert await asyncio.gather(*answers) == expected
        taken.clear()
        assert await serving.ask(long_request()) == long_expected

    try:
        serving.run(scenario())
    finally:
        taken.clear()
        torch.cuda.empty_cache()
    serving.check_idle()
    failures = [each.exc_info for each in caplog.records if each.msg == "pass_failed"]
    assert failures
    assert all(each is not None and each[0] is torch.OutOfMemoryError for each in failures)
    assert "probe_failed" not in [each.msg for each in caplog.records]
