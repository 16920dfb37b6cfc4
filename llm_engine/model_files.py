"""Opens a model on disk, a Hugging Face folder or a GGUF file, in one way."""

from dataclasses import dataclass
from pathlib import Path

from llm_engine.checkpoint import Tensors, read_checkpoint
from llm_engine.errors import CheckpointMissing, UnsupportedModel
from llm_engine.gguf_checkpoint import read_gguf_tensors
from llm_engine.gguf_file import read_gguf_header
from llm_engine.gguf_folder import gguf_folder
from llm_engine.model_config import ModelConfig, read_model_config

GGUF_SUFFIX = ".gguf"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Everything known about a model before its weights are read."""

    config: ModelConfig
    tensors: Tensors
    folder: Path  # with tokenizer, chat template and defaults
    source: Path  # of the configuration, for errors: config.json or the GGUF file


def open_model(model: Path) -> ModelFiles:
    """Read and check everything but the weights and the text side.

    Args:
        model: Folder with config.json and safetensors files, GGUF file, or folder with one.

    Raises:
        CheckpointError: If something is missing, damaged or contradicts itself.
        UnsupportedModel: If the model needs something that is not implemented.
        CacheUnusable: If a GGUF file's metadata cannot be written to the user's cache.
    """
    path = find_gguf(model)
    if path is None:
        config = read_model_config(model)
        return ModelFiles(
            config=config,
            tensors=read_checkpoint(model, config),
            folder=model,
            source=model / "config.json",
        )
    header = read_gguf_header(path)
    folder = gguf_folder(header)
    try:
        config = read_model_config(folder)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    return ModelFiles(
        config=config, tensors=read_gguf_tensors(header, config), folder=folder, source=path
    )


def text_folder(model: Path) -> Path:
    """Return the folder with tokenizer, chat template and defaults; raises as open_model."""
    path = find_gguf(model)
    if path is None:
        return model
    return gguf_folder(read_gguf_header(path))


def find_gguf(model: Path) -> Path | None:
    """Return the GGUF file that a path means; None: it is a folder in Hugging Face's layout.

    Raises:
        CheckpointMissing: If it could mean several files.
    """
    if model.is_file():
        return model
    found = sorted(path for path in model.glob(f"*{GGUF_SUFFIX}") if path.is_file())
    # Some folders have both; the published weights are more precise.
    if not found or any(model.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointMissing(f"{model}: holds {len(found)} GGUF files ({names}); name one")
    return found[0]


def model_name(model: Path) -> str:
    """Return a model's default name: that of its folder or GGUF file."""
    return model.name.removesuffix(GGUF_SUFFIX)
