"""The token of a client's commands: from a file or the environment, never from a flag.

All users of a host can read its command lines.
"""

from pathlib import Path
from typing import Annotated

import typer

from pagewire.arguments import MAX_TOKEN_CHARS, TOKEN_VARIABLE, check_token, given_token, refused
from pagewire.protos.secret_files import warn_if_public

TokenFileFlag = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help=f"File with the tenant's token. Default: {TOKEN_VARIABLE}.",
    ),
]


def token_of(file: Path | None) -> str:
    """Return the token of a file or, without one, of the environment; empty: neither has one.

    Raises:
        InvalidRequestError: The file cannot be read, or contains something else.
    """
    if file is None:
        return given_token()
    try:
        with file.open("rb") as opened:
            warn_if_public(opened)
            content = opened.read(MAX_TOKEN_CHARS + 100)
    except OSError as error:
        raise refused("--token-file", f"{file}: {error.strerror}", "a file to read") from None
    token = content.decode("latin-1").strip()
    if not token:
        raise refused("--token-file", f"nothing in {file}", "a file with a token")
    return check_token(token, "--token-file")
