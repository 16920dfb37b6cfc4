"""The command that creates tokens for tenants: pagewire tokens new."""

import sys
from typing import Annotated

import typer

from cluster.errors import ConfigError
from router.tenants.file import new_token, token_hash
from router.tenants.tenant import NAME, NAME_ALLOWED

TenantArgument = Annotated[str, typer.Argument(help="Name of the tenant in the tenants file.")]

app = typer.Typer(name="tokens", rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def tokens() -> None:
    """Make tokens for the tenants of a router."""


@app.command()
def new(tenant: TenantArgument) -> None:
    """Make a random token; it goes to standard output, its lines of the file to standard error.

    Nothing stores the token. Give it to the tenant, and put its hash into the tenants file, which
    routers reload automatically.
    """
    if not NAME.fullmatch(tenant):
        raise ConfigError(f"TENANT: found {tenant[:70]!r}; allowed: {NAME_ALLOWED}")
    token = new_token()
    sys.stderr.write(
        "The token is shown only once. Add its hash to the tenants file (router.tenants_file):\n"
        f"{tenant}:\n  token_hashes:\n    - {token_hash(token)}\n"
    )
    sys.stdout.write(f"{token}\n")
