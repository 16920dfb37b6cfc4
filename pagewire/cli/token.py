"""The token that commands of a client call with: from a file or the environment, never from a flag.

What stands on a command line is seen by all users of the host.
"""

from pathlib import Path
from typing import Annotated

import typer

from pagewire.arguments import MAX_TOKEN_CHARS, TOKEN_VARIABLE, check_token, given_token, refused

TokenFileFlag = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help=f"File with the token that says for whom to call. Default: {TOKEN_VARIABLE}.",
    ),
]


def token_of(file: Path | None) -> str:
    """Return the token that a file holds, or without one the environment; empty: neither does.

    Raises:
        InvalidRequestError: Nobody can read the file, or it holds something else.
    """
    if file is None:
        return given_token()
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_TOKEN_CHARS + 100)
    except OSError as error:
        raise refused("--token-file", f"{file}: {error.strerror}", "a file to read") from None
    token = content.decode("latin-1").strip()
    if not token:
        raise refused("--token-file", f"nothing in {file}", "a file with a token")
    return check_token(token, "--token-file")
