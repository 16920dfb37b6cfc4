"""A Hugging Face folder with everything of a GGUF file but its weights, in the user's cache.

It is written once per header and version of the writing code, so that router and engine read the
text side and the configuration of a GGUF model like those of any other.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

from llm_engine.cached_folder import cached_folder
from llm_engine.gguf_config import model_config
from llm_engine.gguf_file import GGUFHeader

# What the content depends on
WRITERS = ("gguf_config.py", "gguf_folder.py", "gguf_tokenizer.py", "gguf_vocabulary.py")


def gguf_folder(header: GGUFHeader) -> Path:
    """Return the folder of a file.

    Raises:
        UnsupportedModel: If the file requires something that is not implemented.
        CheckpointCorrupt: If it contradicts itself.
        CacheUnusable: If nothing can be written there.
    """
    config = json.dumps(model_config(header), indent=2)

    def write(folder: Path) -> None:
        from llm_engine.gguf_tokenizer import tokenizer_files  # imports tokenizers

        for name, content in {"config.json": config, **tokenizer_files(header)}.items():
            (folder / name).write_text(content, encoding="utf-8")

    # The header lacks a part of the configuration.
    content = header.digest + config.encode() + _writers_digest()
    identity = hashlib.blake2b(content, digest_size=16).hexdigest()
    return cached_folder(f"gguf-{identity}", write)


@cache
def _writers_digest() -> bytes:
    here = Path(__file__).parent
    sources = b"".join((here / name).read_bytes() for name in WRITERS)
    return hashlib.blake2b(sources, digest_size=16).digest()
