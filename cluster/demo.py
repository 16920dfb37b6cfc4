"""The demo: prompts that share a long prefix, twice, and the account of what was done where.

It fails where a cluster would only look right: when no page moved, or when a decode worker computed
prompt tokens itself.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cluster.demo_model import TOKENIZER_TEXT
from cluster.errors import DemoError
from cluster.status import format_bytes
from pagewire import AsyncClient, Completion, Usage

PREFIX_CHARACTERS = 3_000
MAX_TOKENS = 32
CALL_TIMEOUT_S = 60.0
QUESTIONS = (
    "Which pages travel over the wire?",
    "What happens when a worker dies?",
    "Who picks the worker for a request?",
    "Why is a prefix computed only once?",
    "What does the decode pool read?",
    "When is a page handed out again?",
    "What does each draw depend on?",
    "How are the parts written?",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """The answers to all questions, sent at once."""

    title: str
    completions: tuple[Completion, ...]

    @property
    def usages(self) -> tuple[Usage, ...]:
        """What each answer cost."""
        return tuple(each.usage for each in self.completions if each.usage)

    @property
    def pages_moved(self) -> int:
        """From prefill to decode workers, in all."""
        return sum(usage.pages_moved for usage in self.usages)


async def run_demo(address: str, console: Console) -> tuple[Wave, Wave]:
    """Send the prompts twice, show answers and tables, and check them.

    Raises:
        DemoError: If the cluster did not work as a disaggregated one.
    """
    prompts = demo_prompts()
    async with AsyncClient(address, default_timeout_s=CALL_TIMEOUT_S) as client:
        first = await _run_wave(client, "first wave: all prompts share a prefix", prompts, console)
        console.print(wave_table(first))
        second = await _run_wave(client, "second wave: the same prompts again", prompts, console)
        console.print(wave_table(second))
    console.print(
        f"The first wave moved {first.pages_moved} pages, the second {second.pages_moved}: "
        "only what the decode workers lacked."
    )
    check_waves(first, second)
    return first, second


def demo_prompts() -> tuple[str, ...]:
    """Return the prompts: one long prefix, different ends."""
    text = " ".join(TOKENIZER_TEXT.split())
    repeats = -(-PREFIX_CHARACTERS // len(text))
    prefix = "\n".join(f"Chapter {number + 1}. {text}" for number in range(repeats))
    return tuple(f"{prefix}\nQuestion: {question}\nAnswer:" for question in QUESTIONS)


def wave_table(wave: Wave) -> Table:
    """Draw the account of a wave, one row per request."""
    table = Table(
        title=wave.title,
        title_justify="left",
        show_footer=True,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    usages = wave.usages
    counts = (
        ("\nprompt", [usage.prompt_tokens for usage in usages]),
        ("computed\nprefill", [usage.prefill_computed_tokens for usage in usages]),
        ("\ndecode", [usage.decode_computed_tokens for usage in usages]),
        ("cached\nprefill", [usage.prefill_cached_tokens for usage in usages]),
        ("\ndecode", [usage.decode_cached_tokens for usage in usages]),
        ("moved\npages", [usage.pages_moved for usage in usages]),
    )
    table.add_column("\n", footer="sum")
    for name, values in counts:
        table.add_column(name, justify="right", footer=str(sum(values)))
    total_bytes = sum(usage.bytes_moved for usage in usages)
    table.add_column("\nbytes", justify="right", footer=format_bytes(total_bytes), no_wrap=True)
    table.add_column("TTFT\nms", justify="right")
    table.add_column("ms per\ntoken", justify="right")
    for index, usage in enumerate(usages):
        table.add_row(
            str(index),
            *(str(values[index]) for _, values in counts),
            format_bytes(usage.bytes_moved),
            f"{usage.ttft_ms:.0f}",
            f"{usage.tpot_ms:.1f}",
        )
    return table


def check_waves(first: Wave, second: Wave) -> None:
    """Refuse two waves that show anything but a working disaggregated cluster.

    Raises:
        DemoError: Says what was missing.
    """
    for wave in (first, second):
        if len(wave.usages) != len(QUESTIONS):
            raise DemoError(f"{wave.title}: {len(wave.usages)} of {len(QUESTIONS)} answers ended")
        computed = sum(usage.decode_computed_tokens for usage in wave.usages)
        if computed:
            raise DemoError(f"{wave.title}: decode workers computed {computed} prompt tokens")
    if not sum(usage.bytes_moved for usage in first.usages):
        raise DemoError("no byte moved from the prefill to the decode workers")
    if second.pages_moved >= first.pages_moved:
        raise DemoError(
            f"the second wave moved {second.pages_moved} pages, not fewer than the first's "
            f"{first.pages_moved}: the decode workers' caches were not used"
        )
    texts = [[each.text for each in wave.completions] for wave in (first, second)]
    if texts[0] != texts[1]:
        raise DemoError("the second wave's answers differ from the first's")


async def _run_wave(
    client: AsyncClient, title: str, prompts: Sequence[str], console: Console
) -> Wave:
    answers = [""] * len(prompts)
    with Live(console=console, refresh_per_second=8) as live:

        async def answer(index: int) -> Completion:
            stream = client.stream(prompts[index], max_tokens=MAX_TOKENS, temperature=0.0)
            async with stream:
                async for delta in stream:
                    answers[index] += delta.text
                    live.update(_answers_table(answers))
            return stream.completion

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(index)) for index in range(len(prompts))]
    console.print()
    return Wave(title=title, completions=tuple(task.result() for task in tasks))


def _answers_table(answers: Sequence[str]) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold", min_width=max(map(len, QUESTIONS)))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for index, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True)):
        table.add_row(str(index), question, escape(" ".join(answer.split())))
    return table
