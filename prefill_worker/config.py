"""Configuration of a prefill worker; the composition root fills it from the cluster's."""

from dataclasses import dataclass

from options.kept_by_name import kept_by_name
from options.option import option
from worker.config import HostConfig


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig(HostConfig):
    """Limits and deadlines. Times are seconds."""

    max_step_tokens: int = option(
        2048, "Tokens computed in one step, over all prompts; 256 on CPUs.", at_least=1
    )
    max_computing_prompts: int = option(
        16, "Prompts that hold pages and share the steps.", at_least=1
    )
    max_queued_prompts: int = option(
        1024, "Waiting prompts; more are refused before any work.", at_least=1
    )
    chunk_pages: int = option(
        16,
        "Fewest pages handed to the transfer at a time; a prompt's last may be fewer.",
        at_least=1,
    )
    max_chunk_pages: int = option(
        128,
        "Most pages handed to the transfer at a time, unless chunk_pages is more. Each time has "
        "a cost of its own; fewer pages overlap better. Over a network, 256 MiB move at a time "
        "at most.",
        at_least=1,
    )
