from collections.abc import Callable, Iterator
from functools import cache

import pytest
from openai import OpenAI

from tests.http_gateway.parrot import MARKS, parrot, write_folder
from tests.http_gateway.serving import Gateway, gateway, real_router


@pytest.fixture(scope="module")
def parrots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Gateway]]:
    """Gateways before parrots, by the kind of template; each starts when it is first asked for."""
    running = []

    @cache
    def start(kind: str) -> Gateway:
        folder = write_folder(tmp_path_factory.mktemp(kind), MARKS[kind])
        serving = gateway(lambda: real_router(parrot(folder), folder))
        started = serving.__enter__()
        running.append(serving)
        return started

    yield start
    for serving in running:
        serving.__exit__(None, None, None)


@pytest.fixture(scope="module")
def plain(parrots: Callable[[str], Gateway]) -> Gateway:
    return parrots("plain")


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
