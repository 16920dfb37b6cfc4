"""Refuses a model folder that cannot be served, before anything is started. Reads no weights."""

from pathlib import Path

from cluster.errors import ConfigError
from llm_engine.checkpoint import read_checkpoint
from llm_engine.errors import EngineError
from llm_engine.model_config import read_model_config
from router.errors import ChatTemplateError, ModelFolderError

MAX_PROMPT_CHARS = 1  # nothing is rendered here


def check_model_folder(folder: Path) -> None:
    """Check configuration, tensor headers, tokenizer and chat template.

    Raises:
        ConfigError: Names the file, what was found and what is allowed.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"model is {str(folder)!r}; it must be an existing folder with a checkpoint"
        )
    try:
        read_checkpoint(folder, read_model_config(folder))
        from router.model_folder import read_model_folder  # imports tokenizers and Jinja

        read_model_folder(folder, max_prompt_chars=MAX_PROMPT_CHARS)
    except (EngineError, ModelFolderError, ChatTemplateError) as error:
        raise ConfigError(str(error)) from error
