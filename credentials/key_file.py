"""Files with a cluster's secret or with the keys of routers, readable only by their owner."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from credentials.errors import KeyFileError
from credentials.secret import (
    HASH_KEY_BYTES,
    KEY_BYTES,
    SECRET_BYTES,
    ClusterSecret,
    PartyKeys,
    RouterKeys,
)
from pagewire.protos.secret_files import warn_if_public

MAX_BYTES = 65_536


def read_secret(path: Path) -> ClusterSecret:
    """Return the secret in a file: all its bytes.

    Raises:
        KeyFileError: There is no such file, or it is too short or long.
    """
    content = _read(path)
    if len(content) < SECRET_BYTES:
        raise KeyFileError(
            f"{path} has {len(content)} bytes; it must have {SECRET_BYTES} or more random ones, as "
            "from `head -c 32 /dev/urandom`"
        )
    return ClusterSecret(content)


def write_router_keys(path: Path, keys: RouterKeys) -> None:
    """Write the keys of a router to a new or replaced file that only its owner can read.

    Raises:
        KeyFileError: The file cannot be written.
    """
    content = json.dumps(asdict(keys), default=bytes.hex)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(content)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from error


def read_router_keys(path: Path) -> RouterKeys:
    """Return the keys that write_router_keys has written.

    Raises:
        KeyFileError: The file is missing, or contains something else.
    """
    content = _read(path)
    try:
        found = json.loads(content)
        party = found["party"]
        if party["role"] != "router" or not party["name"]:
            raise ValueError
        return RouterKeys(
            party=PartyKeys(
                role="router",
                name=str(party["name"]),
                accepting=_key(party["accepting"]),
                calling={
                    role: _key(party["calling"][role])
                    for role in ("prefill", "decode", "controller")
                },
            ),
            page_hashes=_key(found["page_hashes"], HASH_KEY_BYTES),
            resume_tokens=_key(found["resume_tokens"]),
        )
    except (ValueError, TypeError, KeyError):  # their messages could show a key
        told = "contains no keys of a router; `pagewire router-keys` writes them"
        raise KeyFileError(f"{path} {told}") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            warn_if_public(file)
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise KeyFileError(f"{path} has more than {MAX_BYTES} bytes")
    return content


def _key(text: Any, size: int = KEY_BYTES) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != size:
        raise ValueError
    return key
