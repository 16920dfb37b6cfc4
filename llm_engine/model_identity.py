"""Tells two models apart without reading all of either: hosts must have copies of the same one."""

from dataclasses import dataclass
from pathlib import Path

from grammars.tokenizer_file import tokenizer_digest
from llm_engine.checkpoint import fingerprint
from llm_engine.errors import CheckpointMissing
from llm_engine.model_files import open_model
from options.kept_by_name import kept_by_name


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """Equal for copies of a model that give the same tokens."""

    weights: str  # and configuration; see llm_engine.checkpoint.fingerprint
    tokenizer: str  # see grammars.tokenizer_file

    def differences(self, other: "ModelIdentity") -> str:
        """Return how another model differs, in words; empty: it is the same one."""
        found = []
        if self.weights != other.weights:
            found.append("another configuration or other weights")
        if self.tokenizer != other.tokenizer:
            found.append("another tokenizer.json")
        return " and ".join(found)


def read_identity(model: Path) -> ModelIdentity:
    """Return the identity of a model; reads some bytes of each tensor.

    Args:
        model: As for open_model.

    Raises:
        EngineError: As open_model does, or if tokenizer.json is missing.
        OSError: A file cannot be read.
    """
    files = open_model(model)
    tokenizer = tokenizer_digest(files.folder)
    if not tokenizer:
        path = files.folder / "tokenizer.json"
        raise CheckpointMissing(f"{path}: no such file; the tokenizer must be there")
    return ModelIdentity(weights=fingerprint(files.config, files.tensors), tokenizer=tokenizer)
