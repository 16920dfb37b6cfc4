"""GET / and /page/{name}: the files of the page, which browsers run unchanged."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# No foreign sources, nothing inline, and no text turned into markup: `innerHTML` throws.
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Cached, but revalidated each time: a new gateway has new files under the old names.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    etag: str


class PageFiles:
    """Serves the page from memory; it needs no key, as it reveals nothing of the cluster."""

    def __init__(self) -> None:
        self._parts = {
            path.name: _load(path) for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES
        }
        self._index = self._parts.pop("index.html")

    async def index(self, request: Request) -> Response:
        """Answer with the page itself."""
        return _answer(request, "/", self._index)

    async def part(self, request: Request) -> Response:
        """Answer with a file that the page names.

        Raises:
            HTTPException: There is no file of that name.
        """
        part = self._parts.get(request.path_params["name"])
        if part is None:
            raise HTTPException(404)
        return _answer(request, "/page/{name}", part)


def _answer(request: Request, path: str, file: _File) -> Response:
    request.scope["record"].path = path
    headers = {**HEADERS, "etag": file.etag}
    # As a substring, because a proxy that compresses makes W/"..." of it.
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


def _load(path: Path) -> _File:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _File(body, MEDIA_TYPES[path.suffix], etag)
