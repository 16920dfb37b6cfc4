from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from openai import OpenAI

from tests.http_gateway.parrot import MARKS, parrot, write_folder
from tests.http_gateway.serving import Gateway, gateway, real_router, scripted
from tests.pagewire.scripted_service import two_words
from tests.router.scripted_worker import ScriptedWorker


@contextmanager
def gateways(
    make_folder: Callable[[str], Path], model: Callable[[Path], ScriptedWorker]
) -> Iterator[Callable[[str], Gateway]]:
    """Gateways before a model, by the kind of template; each starts when it is first asked for."""
    with ExitStack() as running:

        @cache
        def start(kind: str) -> Gateway:
            folder = write_folder(make_folder(kind), MARKS[kind])
            return running.enter_context(gateway(lambda: real_router(model(folder), folder)))

        yield start


@pytest.fixture(scope="module")
def parrots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Gateway]]:
    with gateways(tmp_path_factory.mktemp, parrot) as start:
        yield start


@pytest.fixture(scope="module")
def plain(parrots: Callable[[str], Gateway]) -> Gateway:
    return parrots("plain")


@pytest.fixture(scope="module")
def served() -> Iterator[Gateway]:
    """A gateway whose router says two words."""
    with gateway(lambda: scripted(two_words)) as running:
        yield running


def openai(served: Gateway, **options) -> OpenAI:
    """The official client of a gateway."""
    options.setdefault("max_retries", 0)
    return OpenAI(base_url=f"{served.url}/v1", api_key="unused", timeout=10, **options)


@pytest.fixture(scope="module")
def gathering_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client whose router sends several tokens together."""
    folder = write_folder(tmp_path_factory.mktemp("gathering"), MARKS["plain"])
    with gateway(lambda: real_router(parrot(folder), folder), stream_interval_s=0.03) as served:
        yield openai(served)


@pytest.fixture(scope="module")
def client(plain: Gateway) -> OpenAI:
    return openai(plain)
