"""Files with a cluster's secret or with the keys of routers, readable only by their owner."""

import json
import os
from contextlib import suppress
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
ACCEPTED_SECRET = (
    f"a file with {SECRET_BYTES} to {MAX_BYTES} random bytes, as from `head -c 32 /dev/urandom`"
)
ACCEPTED_KEYS = "a file that `pagewire router-keys` wrote"
ACCEPTED_TARGET = "a file in a folder where this user may write"


def read_secret(path: Path) -> ClusterSecret:
    """Return the secret in a file: all its bytes.

    Raises:
        KeyFileError: There is no such file, or it is too short or long.
    """
    content = _read(path, ACCEPTED_SECRET)
    if len(content) < SECRET_BYTES:
        raise _unusable(path, f"has {len(content)} bytes", ACCEPTED_SECRET)
    return ClusterSecret(content)


def write_router_keys(path: Path, keys: RouterKeys) -> None:
    """Write the keys of a router to a new or replaced file that only its owner can read.

    Raises:
        KeyFileError: It cannot be written, or is not a file, such as a terminal's /dev/stdout.
    """
    given, path = path, Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        raise _unusable(given, "is not a file", ACCEPTED_TARGET)
    content = json.dumps(asdict(keys), default=bytes.hex)
    scratch = path.parent / f".{path.name}.{os.getpid()}"
    try:
        with os.fdopen(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(content)
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):  # the folder may be none, or closed to this user
            scratch.unlink()
        raise _unusable(given, f"cannot be written: {error.strerror}", ACCEPTED_TARGET) from error


def read_router_keys(path: Path) -> RouterKeys:
    """Return the keys that write_router_keys has written.

    Raises:
        KeyFileError: The file is missing, or contains something else.
    """
    content = _read(path, ACCEPTED_KEYS)
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
        raise _unusable(path, "contains no keys of a router", ACCEPTED_KEYS) from None


def _read(path: Path, allowed: str) -> bytes:
    try:
        with path.open("rb") as file:
            warn_if_public(file)
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}", allowed) from error
    if len(content) > MAX_BYTES:
        raise _unusable(path, f"has more than {MAX_BYTES} bytes", allowed)
    return content


def _unusable(path: Path, what: str, allowed: str) -> KeyFileError:
    return KeyFileError(f"found {str(path)!r}, which {what}; allowed: {allowed}")


def _key(text: Any, size: int = KEY_BYTES) -> bytes:
    key = bytes.fromhex(text)
    if len(key) != size:
        raise ValueError
    return key
