"""A prompt as a front end hands it over, and how it becomes token ids."""

from dataclasses import dataclass

from router.errors import ChatTemplateError, InvalidRequest, RefusedByTemplate
from router.model_folder import ModelFolder
from router.tokenizer import Tokenizer
from router.validation import check_packed_token_ids, check_text


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text; the model's special tokens are added."""

    field: str  # its name in the request, for errors
    text: str


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Token ids, packed."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's template, which writes the special tokens itself."""

    field: str
    messages: tuple[tuple[str, str], ...]  # (role, content)


Prompt = Text | PackedTokens | Chat


async def tokenize(prompt: Prompt, folder: ModelFolder, *, max_chars: int) -> tuple[str, list[int]]:
    """Return the text that was tokenized ("" for token ids) and the token ids.

    Raises:
        InvalidRequest: The prompt cannot become tokens.
    """
    if isinstance(prompt, PackedTokens):
        return "", check_packed_token_ids(prompt.packed)
    tokenizer = _require_tokenizer(prompt.field, folder)
    if isinstance(prompt, Text):
        check_text(prompt.field, prompt.text, max_chars)
        return prompt.text, await tokenizer.encode_large(prompt.text, add_special_tokens=True)
    text = _render(prompt, folder, max_chars)
    return text, await tokenizer.encode_large(text, add_special_tokens=False)


def _require_tokenizer(field: str, folder: ModelFolder) -> Tokenizer:
    if folder.tokenizer is None:
        raise InvalidRequest(field, "text", "token_ids: this router has no tokenizer")
    return folder.tokenizer


def _render(prompt: Chat, folder: ModelFolder, max_chars: int) -> str:
    if folder.chat_template is None:
        raise InvalidRequest(
            prompt.field, "a chat", "text or token_ids: the model has no chat template"
        )
    if not prompt.messages:
        raise InvalidRequest(f"{prompt.field}.messages", "none", "at least one message")
    num_chars = 0
    for index, (role, content) in enumerate(prompt.messages):
        num_chars += len(role) + len(content)
        if not role:
            raise InvalidRequest(
                f"{prompt.field}.messages[{index}].role",
                "an empty role",
                "a role of the model's template, such as user",
            )
    if num_chars > max_chars:
        raise InvalidRequest(prompt.field, f"{num_chars} characters", f"at most {max_chars}")
    try:
        return folder.chat_template.render(
            [{"role": role, "content": content} for role, content in prompt.messages]
        )
    except RefusedByTemplate as refused:
        raise InvalidRequest(
            f"{prompt.field}.messages", "messages that the template refuses", str(refused)
        ) from refused
    except ChatTemplateError as error:
        raise InvalidRequest(
            f"{prompt.field}.messages", f"that the model's template {error}", "other messages"
        ) from error
