"""Configuration of an HTTP gateway: what clients may send, and how long it waits for them."""

import re
from dataclasses import dataclass
from typing import Any

from options.option import check_options, option

ORIGIN = re.compile(r"\*|https?://[^\s/,]+")


def _are_origins(value: Any) -> bool:
    return isinstance(value, str) and all(map(ORIGIN.fullmatch, _divided(value)))


def _divided(origins: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in origins.split(",") if each.strip())


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Limits and deadlines. Times are seconds."""

    max_body_mib: int = option(
        16, "Of a request's body; larger ones are refused with 413.", at_least=1
    )
    max_head_bytes: int = option(
        32_768, "Of a request's line and headers; larger ones get 431.", at_least=1
    )
    max_connections: int = option(
        1000, "That are open at a time; further ones get 503.", at_least=1
    )
    max_prompts: int = option(64, "Of one request to /v1/completions.", at_least=1)
    head_timeout_s: float = option(10.0, "For a request's line and headers.", above=0)
    body_timeout_s: float = option(30.0, "For a request's body.", above=0)
    idle_timeout_s: float = option(60.0, "Of a connection between two requests.", above=0)
    slow_client_timeout_s: float = option(
        30.0, "A client that takes nothing for this long is disconnected.", above=0
    )
    request_timeout_s: float = option(
        3600.0, "For a whole answer; the router's own limit holds, too.", above=0
    )
    resume_s: float = option(
        30.0,
        "How long an answer that has begun looks for another router when it loses its own, or for "
        "the same one; 0: it fails at once.",
        at_least=0,
    )
    comment_period_s: float = option(
        15.0,
        "A stream that has no news for this long gets a comment, which keeps proxies from closing "
        "it; the first one also sends the headers.",
        above=0,
    )
    stream_interval_s: float = option(
        0.0,
        "Least time between two events of a stream: tokens that come within it travel together, "
        "which costs less; 0: as router.coalesce_ms says.",
        at_least=0,
    )
    allow_origins: str = option(
        "",
        "Origins of web pages whose scripts may call, divided by commas, or *; empty: none.",
        accepts=_are_origins,
        accepted="origins divided by commas, such as https://chat.example.org, or *",
    )

    @property
    def origins(self) -> tuple[str, ...]:
        """The allowed origins, one by one."""
        return _divided(self.allow_origins)

    def __post_init__(self) -> None:
        check_options(self)
