"""The ASGI application: paths, their endpoints, and answers for other paths."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from http_gateway.body import Bodies
from http_gateway.chat import ChatCompletions
from http_gateway.cluster_view import ClusterView
from http_gateway.completions import Completions
from http_gateway.config import GatewayConfig
from http_gateway.errors import HttpError
from http_gateway.exchange import Endpoint, Exchange, RequestLog
from http_gateway.http_metrics import Metrics
from http_gateway.models import Models
from http_gateway.page_files import PageFiles
from http_gateway.probes import Probes
from http_gateway.responses import Responses
from http_gateway.token_texts import TokenTexts
from http_gateway.tokens import Tokens
from http_gateway.wire import RouterLink
from pagewire.arguments import did_you_mean

Answer = Callable[[Exchange, dict[str, Any]], Awaitable[None]]
Admit = Callable[[str], Awaitable[str]]
ANYBODYS = {"/health", "/ready"}  # orchestrators may use any name


def build_app(link: RouterLink, config: GatewayConfig, *, is_local: bool) -> RequestLog:
    """Return the application that answers for one router.

    Args:
        link: The connection to the routers.
        config: Limits, and who may call.
        is_local: Whether only this host can reach the gateway.
    """
    checks_host = is_local and "*" not in config.hosts
    metrics = Metrics()
    texts = TokenTexts(link)
    models, tokens, probes = Models(link), Tokens(link), Probes(link)
    cluster, page = ClusterView(link), PageFiles()
    endpoint = partial(Endpoint, config=config, metrics=metrics, bodies=Bodies(config))

    def get(path: str, answer: Answer, *, admit: Admit | None = link.tenant) -> Route:
        checks = checks_host and path not in ANYBODYS
        answering = endpoint(path, answer, admit=admit, reads_body=False, checks_host=checks)
        return Route(path, answering, methods=["GET"])

    def post(path: str, answer: Answer) -> Route:
        answering = endpoint(path, answer, admit=link.tenant, checks_host=checks_host)
        return Route(path, answering, methods=["POST"])

    middleware = []
    if config.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
            )
        )
    app = Starlette(
        routes=[
            post("/v1/chat/completions", ChatCompletions(link, texts).answer),
            post("/v1/completions", Completions(link, texts, config).answer),
            post("/v1/responses", Responses(link, texts).answer),
            get("/v1/models", models.list),
            get("/v1/models/{model:path}", models.show),
            post("/tokenize", tokens.tokenize),
            post("/detokenize", tokens.detokenize),
            get("/health", probes.health, admit=None),
            get("/ready", probes.ready, admit=None),
            get("/metrics", probes.metrics, admit=None),  # it checks permission itself
            get("/cluster", cluster.show),
            Route("/", page.index, methods=["GET"]),
            Route("/page/{name}", page.part, methods=["GET"]),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _no_endpoint},
    )
    # A redirect's target would contain a scheme and a name that a proxy may have changed.
    app.router.redirect_slashes = False
    return RequestLog(app, metrics)


async def _no_endpoint(request: Request, error: Exception) -> Response:
    """Answer for an unknown path, or a method that the path does not support."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    shown = f"{request.method[:20]} {request.url.path[:100]}"
    if error.status_code == 405:
        refusal = HttpError(405, f"{shown}: allowed: {headers['Allow']}", code="method_not_allowed")
    else:
        paths = sorted({each.path.replace(":path", "") for each in request.app.routes})
        meant = did_you_mean(request.url.path, paths)
        message = f"{shown}: there is no such endpoint{meant}; allowed: {', '.join(paths)}"
        refusal = HttpError(error.status_code, message, code="not_found")
    request.scope["record"].outcome = refusal.code
    return Response(refusal.body, error.status_code, headers=headers, media_type="application/json")
