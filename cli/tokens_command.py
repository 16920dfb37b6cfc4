"""The command that makes tokens of tenants: pagewire tokens new."""

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
    """Make a random token: it goes to standard output, what the file needs to standard error.

    Nothing keeps the token. Give it to the tenant, and put its hash into the tenants file; routers
    read the file again by themselves.
    """
    if not NAME.fullmatch(tenant):
        raise ConfigError(f"TENANT is {tenant[:70]!r}; it must be {NAME_ALLOWED}")
    token = new_token()
    sys.stderr.write(
        "The token is shown this once. The tenants file (router.tenants_file) gets its hash:\n"
        f"{tenant}:\n  token_hashes:\n    - {token_hash(token)}\n"
    )
    sys.stdout.write(f"{token}\n")
