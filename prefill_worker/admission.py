"""Checks whether a prompt can be computed here at all, before any work."""

from kv_cache.layout import num_pages_for
from prefill_worker.config import PrefillConfig
from prefill_worker.errors import InvalidPrompt
from prefill_worker.request import Prompt
from protos.sampling_limits import MAX_CHOICES
from worker.errors import Overloaded
from worker.identity import ModelInfo
from worker.sampling_check import check_sampling


def check_prompt(
    prompt: Prompt,
    *,
    config: PrefillConfig,
    model: ModelInfo,
    page_size: int,
    num_waiting: int,
) -> None:
    """Check a prompt against the limits of worker and model.

    Raises:
        InvalidPrompt: Names the field, what was found and what is allowed.
        Overloaded: Too many prompts are queued already.
    """
    num_tokens = len(prompt.tokens)
    if not 1 <= prompt.prompt_len <= num_tokens:
        raise InvalidPrompt(f"prompt_len: found {prompt.prompt_len}; allowed: 1 to {num_tokens}")
    if num_tokens >= model.max_context_tokens:
        raise InvalidPrompt(
            f"token_ids: found {num_tokens} tokens; allowed: fewer than "
            f"{model.max_context_tokens}, what the context holds"
        )
    try:
        model.check_tokens("token_ids", prompt.tokens)
        check_sampling(prompt.params, model)
    except ValueError as error:
        raise InvalidPrompt(str(error)) from None
    if not 0 < prompt.cache_share <= 1:  # nor NaN
        raise InvalidPrompt(f"cache_share: found {prompt.cache_share}; allowed: above 0, up to 1")
    if not prompt.choices:
        raise InvalidPrompt("choices: found none; allowed: one or more")
    if max(prompt.choices) >= MAX_CHOICES or len(set(prompt.choices)) < len(prompt.choices):
        shown = ", ".join(map(str, prompt.choices[:MAX_CHOICES]))
        raise InvalidPrompt(f"choices: found {shown}; allowed: 0 to {MAX_CHOICES - 1}, each once")
    num_pages = num_pages_for(num_tokens, page_size)
    if prompt.first_page >= num_pages:
        raise InvalidPrompt(f"first_page: found {prompt.first_page}; allowed: 0 to {num_pages - 1}")
    if num_waiting >= config.max_queued_prompts:
        raise Overloaded(f"{num_waiting} of {config.max_queued_prompts} places to wait are taken")
