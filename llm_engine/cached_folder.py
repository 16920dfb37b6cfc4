"""Folders in the user's cache, written once and atomically, and rewritten when damaged.

A list of digests beside the files shows whether they are intact.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llm_engine.errors import CacheUnusable

DIGESTS = "digests.json"  # file name |-> digest of its content


def cached_folder(
    name: str, write: Callable[[Path], None], *, cache_dir: Path | None = None
) -> Path:
    """Return a folder of the cache, writing it if it is missing or damaged.

    Args:
        name: The name of the folder; it identifies the content: other content, other name.
        write: Writes the files into an empty folder.
        cache_dir: Parent of the folder; default: the user's cache.

    Raises:
        CacheUnusable: If nothing can be written there, or the user has no home.
    """
    folder = (cache_dir or user_cache_dir()) / name
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: processes that start together never see half a folder.
        with tempfile.TemporaryDirectory(
            prefix=f".{name}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as aside:
            _replace(folder, write, Path(aside))
    except OSError as error:
        raise CacheUnusable(
            f"{folder}: cannot be written: {error}; set PAGEWIRE_CACHE_DIR to a folder that can"
        ) from error
    return folder


def user_cache_dir() -> Path:
    """Return the folder in which Pagewire keeps what it can make again.

    Raises:
        CacheUnusable: If the user has no home.
    """
    if chosen := os.environ.get("PAGEWIRE_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "pagewire"
    try:
        return Path.home() / ".cache" / "pagewire"
    except RuntimeError as error:
        raise CacheUnusable(
            f"HOME: found none for user {os.getuid()}; set PAGEWIRE_CACHE_DIR to a folder that "
            "can be written"
        ) from error


def _replace(folder: Path, write: Callable[[Path], None], aside: Path) -> None:
    new, damaged = aside / "new", aside / "damaged"
    new.mkdir()
    write(new)
    digests = {path.name: _digest(path) for path in new.iterdir()}
    (new / DIGESTS).write_text(json.dumps(digests))
    if not _is_whole(folder):
        with suppress(FileNotFoundError):  # it was not there, or another process was faster
            folder.rename(damaged)
    try:
        new.rename(folder)
    except OSError:
        if not _is_whole(folder):  # otherwise another process has written the same content
            raise


def _is_whole(folder: Path) -> bool:
    try:
        digests = json.loads((folder / DIGESTS).read_bytes())
        return all(_digest(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
