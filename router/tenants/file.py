"""The tenants file: a mapping of names to rules, read whole or not at all.

    acme:
      token_hashes:
        - sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      requests_per_s: 5

It holds hashes, not tokens. Whoever reads it learns who the tenants are, but cannot call as one: a
token has 256 random bits, so that its hash needs neither salt nor a slow function.
"""

import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from options.option import options_of
from options.yaml_text import Lines, YamlError, parse_yaml, told_found, told_kind
from pagewire.arguments import did_you_mean
from pagewire.cli.units import invalid_byte
from pagewire.protos.secret_files import told_if_public
from router.errors import TenantsFileError
from router.tenants.tenant import NAME, NAME_ALLOWED, TenantRules

MAX_BYTES = 2**20  # takes some seconds to read, beside the event loop
HASH_PREFIX = "sha256:"
TOKEN_PREFIX = "pw-"  # noqa: S105 - by which people and secret scanners recognize a token
TOKEN_BYTES = 32  # random ones
_HEX_CHARS = 64
_HASHES = "token_hashes"
_HASH_ALLOWED = f"{HASH_PREFIX} and {_HEX_CHARS} hexadecimal digits, from `pagewire tokens new`"


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantsFile:
    """What a file holds."""

    rules: tuple[TenantRules, ...]
    version: tuple[int, ...]  # changes when the file is changed or replaced
    warning: str = ""  # about the file itself; empty: all is well


def new_token() -> str:
    """Return a new random token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_hash(token: str) -> str:
    """Return the hash of a token as the file has it."""
    return HASH_PREFIX + digest_of(token.encode()).hex()


def digest_of(token: bytes) -> bytes:
    """Return what a router knows of a token."""
    return sha256(token).digest()


def read_tenants(path: Path) -> TenantsFile:
    """Read a file.

    Raises:
        TenantsFileError: It cannot be used; the message has a line for each fault.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may never end
            raise _unreadable(path, "it is not a file")
        with path.open("rb") as file:
            found = os.fstat(file.fileno())  # first: a later change makes another version
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    if len(content) > MAX_BYTES:
        raise TenantsFileError(f"{path}: found more than {MAX_BYTES} bytes; allowed: no more")
    try:
        tenants, keys = parse_yaml(content.decode())
    except UnicodeDecodeError as error:
        raise TenantsFileError(
            f"{path}: {invalid_byte(error)} is not UTF-8; allowed: YAML in UTF-8"
        ) from error
    except YamlError as error:
        raise TenantsFileError(f"{path}{error}") from error
    if tenants is None or tenants == {}:
        # It opens the router neither to everybody nor to nobody: an empty file means neither.
        raise TenantsFileError(
            f"{path}: found no tenant; allowed: one or more. Without router.tenants_file everybody "
            "may call"
        )
    if not isinstance(tenants, Mapping):
        told = f"found {told_kind(tenants)} at the top level; allowed: a mapping of tenants"
        raise TenantsFileError(f"{path}: {told}")
    rules = _Reader(path, keys).read(tenants)
    warning = told_if_public(path, found.st_mode)
    return TenantsFile(rules=rules, version=_version(found), warning=warning)


def _unreadable(path: Path, reason: str | None) -> TenantsFileError:
    return TenantsFileError(
        f"router.tenants_file: found {str(path)!r}, which cannot be read: {reason}; allowed: a "
        "file of tenants"
    )


def version_of(path: Path) -> tuple[int, ...]:
    """Return the version of the file that is there now; a missing file has a version of its own."""
    try:
        return _version(path.stat())
    except OSError as error:
        return (error.errno or 0,)


def _version(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


class _Reader:
    """Collects what is wrong while it reads."""

    def __init__(self, path: Path, keys: Lines) -> None:
        self._path = path
        self._written = {each.path: each.written for each in keys}
        self._lines = {each.path: each.line for each in reversed(keys)}  # the first of each
        self._wrong: list[tuple[int, str]] = []
        self._owners: dict[bytes, str] = {}  # digest |-> where it is
        seen: set[str] = set()
        for key, line, _ in keys:
            if key in seen:
                told = f"{key} is given twice, in lines {self._lines[key]} and {line}"
                self._wrong.append((line, f"{told}; give it once"))
            seen.add(key)

    def read(self, found: Mapping[str, Any]) -> tuple[TenantRules, ...]:
        rules = []
        for name, values in found.items():
            if not NAME.fullmatch(name):
                self._refuse(name, f"name of a tenant: found {name[:70]!r}; allowed:", NAME_ALLOWED)
            elif not isinstance(values, Mapping):
                told = (
                    f"{name}: found {self._shown(name, values)}; allowed: a mapping with {_HASHES}"
                )
                self._refuse(name, told)
            else:
                rules.append(self._tenant(name, values))
        self._check_shares(rules)
        if self._wrong:
            raise TenantsFileError(
                "\n".join(
                    f"{self._path}, line {line}: {message}" for line, message in sorted(self._wrong)
                )
            )
        return tuple(rules)

    def _tenant(self, name: str, values: Mapping[str, Any]) -> TenantRules:
        options = options_of(TenantRules)
        given = dict(values)
        digests = self._digests(name, given.pop(_HASHES, None))
        for key, value in list(given.items()):
            path = f"{name}.{key}"
            if key not in options:
                names = [_HASHES, *options]
                near = did_you_mean(key, names, f"{name}.")
                told = f"{path}: found an unknown option{near}; allowed:"
                self._refuse(path, told, ", ".join(names))
            elif not options[key].allows(value):
                found = f"{path}: found {self._shown(path, value)}; allowed:"
                self._refuse(path, found, options[key].allowed())
            else:
                continue
            del given[key]
        return TenantRules(name=name, token_digests=digests, **given)

    def _check_shares(self, rules: Sequence[TenantRules]) -> None:
        first: dict[str, TenantRules] = {}  # cache |-> the first tenant of it
        for each in rules:
            other = first.setdefault(each.cache, each) if each.cache else each
            if each.cache_share != other.cache_share:
                path = f"{each.name}.cache_share"
                told = (
                    f"{path}: found {each.cache_share:g}; allowed: {other.cache_share:g}, the share"
                )
                told = f"{told} of {other.name}, because tenants of one cache have the same share"
                self._refuse(path, told)

    def _digests(self, name: str, values: Any) -> frozenset[bytes]:
        path = f"{name}.{_HASHES}"
        if not isinstance(values, list) or not values:
            found = "an empty list" if values == [] else _kind(values)
            self._refuse(path, f"{path}: found {found}; allowed: a list of one or more hashes")
            return frozenset()
        digests = set()
        for index, value in enumerate(values):
            digest = _digest(value)
            if digest is None:  # not shown: it may be the token itself
                found = f"a text of length {len(value)}" if isinstance(value, str) else _kind(value)
                told = f"{path}[{index}]: found {found}; allowed:"
                self._refuse(path, told, _HASH_ALLOWED)
            elif other := self._owners.get(digest):
                told = f"{path}[{index}]: found the hash of {other}; allowed: that of another token"
                self._refuse(path, told)
            else:
                self._owners[digest] = f"{path}[{index}]"
                digests.add(digest)
        return frozenset(digests)

    def _shown(self, key: str, value: Any) -> str:
        return told_found(value, self._written.get(key, ""))[:80]

    def _refuse(self, key: str, *told: str) -> None:
        line = self._lines.get(key) or self._lines.get(key.partition(".")[0], 1)
        self._wrong.append((line, " ".join(told)))


def _digest(value: Any) -> bytes | None:
    if not isinstance(value, str) or not value.startswith(HASH_PREFIX):
        return None
    digits = value.removeprefix(HASH_PREFIX)
    if len(digits) != _HEX_CHARS or not all(each in "0123456789abcdefABCDEF" for each in digits):
        return None
    return bytes.fromhex(digits)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
