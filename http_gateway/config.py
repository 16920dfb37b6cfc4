"""Configuration of an HTTP gateway: limits on requests, and deadlines."""

import re
from dataclasses import dataclass
from typing import Any

from options.kept_by_name import kept_by_name
from options.option import check_options, option

HOST = re.compile(r"\*|[^\s/:,]+")
ORIGIN = re.compile(r"\*|https?://[^\s/,]+")


def _are_origins(value: Any) -> bool:
    return isinstance(value, str) and all(map(ORIGIN.fullmatch, _divided(value)))


def _are_hosts(value: Any) -> bool:
    return isinstance(value, str) and all(map(HOST.fullmatch, _divided(value)))


def _divided(names: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in names.split(",") if each.strip())


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Limits and deadlines. Times are seconds."""

    max_body_mib: int = option(
        16, "Largest body of a request; larger ones are refused with 413.", at_least=1
    )
    max_head_bytes: int = option(
        32_768, "Largest request line and headers; larger ones get 431.", at_least=1
    )
    max_connections: int = option(
        1000,
        "Most open connections; a further one takes the place of one that has sent no complete "
        "head within a second of opening, or gets 503.",
        at_least=1,
    )
    max_prompts: int = option(64, "Most prompts of a request to /v1/completions.", at_least=1)
    head_timeout_s: float = option(10.0, "Time limit for a request's line and headers.", above=0)
    body_timeout_s: float = option(30.0, "Time limit for a request's body.", above=0)
    idle_timeout_s: float = option(
        60.0, "Longest pause of a connection between two requests.", above=0
    )
    slow_client_timeout_s: float = option(
        30.0, "A client that reads nothing for this long is disconnected.", above=0
    )
    request_timeout_s: float = option(
        3600.0, "Time limit for a whole answer; the router's own limit applies, too.", above=0
    )
    resume_s: float = option(
        30.0,
        "How long an answer that loses its router looks for another one, or for the same one to "
        "come back; 0: it fails at once.",
        at_least=0,
    )
    comment_period_s: float = option(
        15.0,
        "A stream that is silent for this long gets a comment, which keeps proxies from closing "
        "it; the first one also sends the headers.",
        above=0,
    )
    stream_interval_s: float = option(
        0.0,
        "Shortest time between two events of a stream: tokens that arrive within it share an "
        "event, which costs less; 0: as router.coalesce_ms says.",
        at_least=0,
    )
    allow_origins: str = option(
        "",
        "Origins of web pages whose scripts may call, separated by commas, or *; empty: none.",
        accepts=_are_origins,
        accepted="origins separated by commas, such as https://chat.example.org, or *",
    )
    allow_hosts: str = option(
        "",
        "Names by which clients without a tenant's token may address a gateway that listens on the "
        "loopback address, separated by commas, or *. Addresses and localhost are always allowed.",
        accepts=_are_hosts,
        accepted="host names separated by commas, such as llm.example.org, or *",
    )

    @property
    def hosts(self) -> tuple[str, ...]:
        """The allowed host names, one by one, in lower case."""
        return _divided(self.allow_hosts.lower())

    @property
    def origins(self) -> tuple[str, ...]:
        """The allowed origins, one by one."""
        return _divided(self.allow_origins)

    def __post_init__(self) -> None:
        check_options(self)
