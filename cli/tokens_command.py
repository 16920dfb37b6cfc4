"""The command that creates tokens for tenants: pagewire tokens new."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import ConfigError
from pagewire.cli.strict_command import StrictCommand
from router.tenants.file import new_token, token_hash
from router.tenants.tenant import NAME, NAME_ALLOWED

TenantArgument = Annotated[str, typer.Argument(help="Name of the tenant in the tenants file.")]
OutFlag = Annotated[
    Path | None,
    typer.Option("--out", help="File to create for the token; only its owner may read it."),
]

app = typer.Typer(name="tokens", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def tokens() -> None:
    """Make tokens for the tenants of a router."""


@app.command(cls=StrictCommand)
def new(tenant: TenantArgument, out: OutFlag = None) -> None:
    """Make a random token; standard error says what to add to the tenants file.

    The token goes to --out, otherwise to standard output; nothing else stores it. Give it to the
    tenant, and put its hash into the tenants file, which routers reload automatically.
    """
    if not NAME.fullmatch(tenant):
        raise ConfigError(f"TENANT: found {tenant[:70]!r}; allowed: {NAME_ALLOWED}")
    token = new_token()
    if out is not None:
        _write(out, token)
    where = "shown only once" if out is None else f"in {out} alone"
    sys.stderr.write(
        f"The token is {where}. Add its hash to the tenants file (router.tenants_file):\n"
        f"{tenant}:\n  token_hashes:\n    - {token_hash(token)}\n"
    )
    if out is None:
        sys.stdout.write(f"{token}\n")


def _write(path: Path, token: str) -> None:
    """Write a token to a new file that only its owner may read."""
    try:
        opened = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(opened, "w") as file:
                file.write(f"{token}\n")
        except OSError:
            path.unlink()  # a part of it
            raise
    except OSError as error:
        found = f"{str(path)!r}: {error.strerror}"
        raise ConfigError(f"--out: found {found}; allowed: a file to create") from error
