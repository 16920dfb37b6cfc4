"""Refuses a model that cannot be served, before anything is started. Reads no weights."""

from pathlib import Path

from cluster.errors import ConfigError
from llm_engine.errors import EngineError
from llm_engine.kernel_shapes import check_kernel_shapes
from llm_engine.model_files import ModelFiles, open_model
from router.config import MAX_PROMPT_CHARS
from router.errors import ChatTemplateError, ModelFolderError


def check_model_files(model: Path) -> ModelFiles:
    """Check configuration and tensor headers of a folder or GGUF file; imports nothing slow.

    Raises:
        ConfigError: Names the file, what was found and what is allowed.
    """
    if not model.exists():
        raise ConfigError(
            f"model: found {str(model)!r}; allowed: an existing folder with a checkpoint, or a "
            "GGUF file; models are not downloaded from a hub"
        )
    try:
        return open_model(model)
    except EngineError as error:
        raise ConfigError(str(error)) from error


def check_model_folder(model: Path) -> None:
    """Check configuration, tensor headers, tokenizer and chat template of a folder or GGUF file.

    Raises:
        ConfigError: Names the file, what was found and what is allowed.
    """
    files = check_model_files(model)
    try:
        from router.chat_renderer import check_template
        from router.model_folder import read_model_folder  # imports tokenizers and Jinja

        text_side = read_model_folder(files.folder, max_prompt_chars=MAX_PROMPT_CHARS)
        if text_side.chat_template is not None:
            check_template(text_side.chat_template)
    except ChatTemplateError as error:
        raise ConfigError(f"chat template of {model}: {error}") from error
    except ModelFolderError as error:
        raise ConfigError(str(error) if files.folder == model else f"{model}: {error}") from error
    except EngineError as error:
        raise ConfigError(str(error)) from error
    tokenizer = text_side.tokenizer
    assert tokenizer is not None
    for name in ("bos_token", "eos_token"):  # prompts and answers need no other
        text = tokenizer.special_tokens.get(name)
        token_id = None if text is None else tokenizer.token_id(text)
        if token_id is not None and token_id >= files.config.vocab_size:
            raise ConfigError(
                f"{model}: {name} {text!r} is token {token_id} of the tokenizer, but vocab_size "
                f"in config.json is {files.config.vocab_size}"
            )


def check_kernels(model: Path) -> None:
    """Check that GPUs can serve the model.

    Raises:
        ConfigError: Names the key of config.json, what was found and what is allowed.
    """
    try:
        files = open_model(model)
        check_kernel_shapes(files.source, files.config)
    except EngineError as error:
        raise ConfigError(str(error)) from error
