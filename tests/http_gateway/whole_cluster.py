"""A cluster whose tokens can be foretold: both pools with a fake model, a router that reads text.

All of it runs in one event loop, over real gRPC and TCP. Canaries are streams that go on beside
whatever a test does, over gRPC and over HTTP: each must get just the tokens of the oracle.
"""

import http.client
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.sampling import SamplingParams
from pagewire.protos import common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from router.config import RouterConfig
from router.front import make_server
from router.membership import WorkerMember
from router.router import Router
from router.tokenizer import Tokenizer
from tests.http_gateway.canaries import Canary, events_of, undisturbed
from tests.http_gateway.serving import Gateway
from tests.support.cluster_keys import credentials_of, proven
from tests.support.fake_engine import FakeEngine, FakeModel, fake_tokens
from tests.support.fake_workers import FakeWorkers

POOLS = {"prefill-0": "prefill", "decode-0": "decode"}
PAGE_SIZE = 4
STEP_S = 0.02  # so that a song takes a while, and the host does other things, too
SONG_TOKENS = 50
LONGEST_PAUSE_S = 1.0


class PacedEngine(FakeEngine):
    """Takes its time for each step, and keeps the prompts that it was given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: set[tuple[int, ...]] = set()

    def launch(self, step: EngineStep) -> None:
        self.seen |= {tuple(each.prompt_token_ids) for each in step.started}
        super().launch(step)

    def read(self) -> StepResult:
        time.sleep(STEP_S)  # in the engine's own thread
        return super().read()


@dataclass(frozen=True, kw_only=True)
class WholeCluster:
    """What runs, and what can be foretold of it."""

    workers: FakeWorkers
    router: Router
    model: FakeModel
    tokenizer: Tokenizer

    @property
    def prompts(self) -> list[str]:
        """The texts for which workers have decoded."""
        engine = self.workers.engines["decode-0"]
        assert isinstance(engine, PacedEngine)
        return [self.tokenizer.decode(each) for each in list(engine.seen)]


@asynccontextmanager
async def whole_cluster(folder: Path) -> AsyncIterator[tuple[str, WholeCluster]]:
    """Serve a folder with tokenizer and template; yields the router's address, and all of it."""
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text())
    model = FakeModel(name="tiny", vocab_size=400, eos_token_ids=(tokenizer.token_id("<|end|>"),))
    workers = FakeWorkers(model, page_size=PAGE_SIZE, make_engine=PacedEngine, text_folder=folder)
    for worker_id in POOLS:
        await workers.start(worker_id)
    credentials = credentials_of("router", "router-0")
    config = RouterConfig(resume_key=b"k" * 32)
    router = Router(
        config=config,
        model_dir=folder,
        connect_channel=lambda member: proven(
            grpc.aio.insecure_channel(member.address), member, credentials
        ),
        random_id=lambda: secrets.token_hex(16),
    )
    server = make_server(config)
    port = server.add_insecure_port("127.0.0.1:0")
    router.register(server)
    await router.start()
    await server.start()
    members = [
        WorkerMember(
            worker_id=worker_id,
            incarnation=workers.identities[worker_id].incarnation,
            address=workers.identities[worker_id].address,
            pool=pool,
        )
        for worker_id, pool in POOLS.items()
    ]
    await router.set_workers(members)
    try:
        yield (
            f"127.0.0.1:{port}",
            WholeCluster(workers=workers, router=router, model=model, tokenizer=tokenizer),
        )
    finally:
        await router.stop(0.0)
        await server.stop(None)
        await workers.stop()


@dataclass(frozen=True, kw_only=True)
class Song:
    """A prompt, and what must come of it."""

    prompt: list[int]
    seed: int
    tokens: list[int]


class Singer(Canary):
    """Makes its songs itself: half of them are sampled greedily."""

    def __init__(self, served: Gateway, name: str) -> None:
        super().__init__(served, name)
        self.rng = random.Random(name)

    def compose(self) -> Song:
        """Return what is to be sung next."""
        prompt = [self.rng.randrange(2, 300) for _ in range(self.rng.randrange(5, 25))]
        seed = self.rng.randrange(2**32)
        temperature = float(seed % 2)
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=SONG_TOKENS, ignore_eos=True
        )
        tokens = fake_tokens(prompt, params, model=self.served.backend.model)
        return Song(prompt=prompt, seed=seed, tokens=tokens)


class GrpcCanary(Singer):
    """Compares token by token, each at its place."""

    def sing(self) -> None:
        song = self.compose()
        sampling = common_pb2.SamplingParams(
            temperature=song.seed % 2, seed=song.seed, max_tokens=SONG_TOKENS, ignore_eos=True
        )
        request = inference_pb2.GenerateRequest(
            token_ids=pack_token_ids(song.prompt), sampling=sampling
        )
        heard: list[int] = []
        with grpc.insecure_channel(self.served.router_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for message in self.watched(iter(stub.Generate(request, timeout=30))):
                assert message.first_index == len(heard), "a token is lost or repeated"
                heard += unpack_token_ids(message.token_ids)
        assert heard == song.tokens, f"{heard} is not {song.tokens}"


class HttpCanary(Singer):
    """Compares the text, which is all that HTTP tells, and the number of tokens."""

    def sing(self) -> None:
        song = self.compose()
        body = {
            "prompt": song.prompt,
            "temperature": song.seed % 2,
            "seed": song.seed,
            "max_tokens": SONG_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(*self.served.host_and_port, timeout=30)
        heard, num_tokens = "", 0
        with closing(connection):
            for event in self.watched(events_of(connection, "/v1/completions", body)):
                assert "error" not in event, event
                heard += "".join(choice["text"] for choice in event["choices"])
                num_tokens = (event["usage"] or {}).get("completion_tokens", 0)
        expected = self.served.backend.tokenizer.decode(song.tokens)
        assert heard == expected, f"{heard!r} is not {expected!r}"
        assert num_tokens == SONG_TOKENS


def singing(served: Gateway) -> AbstractContextManager[None]:
    """Let one of each kind sing beside what a test does with a whole cluster."""
    canaries = [kind(served, kind.__name__) for kind in (GrpcCanary, HttpCanary)]
    return undisturbed(canaries, LONGEST_PAUSE_S)
