"""Tells whether two folders have the same tokenizer."""

import hashlib
from pathlib import Path


def tokenizer_digest(folder: Path) -> str:
    """Return a digest of a folder's tokenizer.json, hexadecimal; empty: there is none.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        content = (folder / "tokenizer.json").read_bytes()
    except FileNotFoundError:
        return ""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
