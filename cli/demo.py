"""The demo: questions about one document, asked twice, and an account of the work by place.

It fails if the cluster only seems to work: if no page moved, if a decode worker computed prompt
tokens itself, or if a page of a prompt was neither moved nor found in a cache.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cli.demo_text import DOCUMENT, QUESTIONS
from cluster.errors import DemoError
from pagewire import (
    AsyncClient,
    AsyncStream,
    Completion,
    InvalidRequestError,
    Message,
    SamplingOptions,
    Tls,
    Usage,
)
from pagewire.cli.units import format_bytes

MAX_TOKENS = 32
STOP = (". ",)  # small models answer in the first sentence, then ramble on
CALL_TIMEOUT_S = 600.0  # a real checkpoint on two cores takes minutes
TITLES = (
    "first wave: all questions are about one document",
    "second wave: the same questions again",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """The answers to all questions, sent at once."""

    title: str
    completions: tuple[Completion, ...]
    page_size: int  # of the cluster, token slots

    @property
    def usages(self) -> tuple[Usage, ...]:
        """The cost of each answer."""
        return tuple(each.usage for each in self.completions if each.usage)

    @property
    def pages_moved(self) -> int:
        """Pages moved from prefill to decode workers, in all."""
        return sum(usage.pages_moved for usage in self.usages)

    @property
    def pages_cached(self) -> int:
        """Pages found in the decode workers' caches, in all."""
        return sum(usage.decode_cached_tokens for usage in self.usages) // self.page_size

    @property
    def prompt_pages(self) -> int:
        """Pages of all prompts; the last page of each counts as full."""
        return sum(pages_of(usage, self.page_size) for usage in self.usages)


async def run_demo(
    address: str, tls: Tls | None, console: Console, token: str = ""
) -> tuple[Wave, Wave]:
    """Ask all questions twice, show answers and tables, and check them.

    Args:
        address: The address of the router.
        console: Where to write.
        token: For calls to the router; empty: none.

    Raises:
        DemoError: If the cluster did not work as a disaggregated one.
        PagewireError: If a prompt was refused or not answered.
    """
    waves = []
    async with AsyncClient(
        address, token=token, default_timeout_s=CALL_TIMEOUT_S, tls=tls
    ) as client:
        page_size = (await client.list_models())[0].page_size
        is_chat = await _has_chat_template(client)
        for title in TITLES:
            completions = await _ask(client, is_chat, console)
            waves.append(Wave(title=title, completions=completions, page_size=page_size))
            console.print(wave_table(waves[-1]))
            console.print(account_line(waves[-1]), "\n")
    first, second = waves
    check_waves(first, second)
    console.print(
        f"The first wave moved {first.pages_moved} pages, the second {second.pages_moved}: "
        "only those that the decode workers lacked."
    )
    return first, second


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
    table.add_column("\n", footer="sum", min_width=len("sum"), no_wrap=True)
    for name, values in counts:
        table.add_column(name, justify="right", footer=str(sum(values)), no_wrap=True)
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


def pages_of(usage: Usage, page_size: int) -> int:
    """Return how many pages a prompt takes; its last one counts as full."""
    return -(-usage.prompt_tokens // page_size)


def account_line(wave: Wave) -> str:
    """Say where the pages of all prompts came from."""
    return (
        f"{wave.prompt_pages} prompt pages = {wave.pages_moved} moved + {wave.pages_cached} found "
        "in the decode workers' caches"
    )


def check_waves(first: Wave, second: Wave) -> None:
    """Check that two waves show a working disaggregated cluster.

    Raises:
        DemoError: They do not; says what was missing.
    """
    for wave in (first, second):
        if len(wave.usages) != len(QUESTIONS):
            raise DemoError(f"{wave.title}: {len(wave.usages)} of {len(QUESTIONS)} answers ended")
        computed = sum(usage.decode_computed_tokens for usage in wave.usages)
        if computed:
            raise DemoError(f"{wave.title}: decode workers computed {computed} prompt tokens")
        for index, usage in enumerate(wave.usages):
            pages = pages_of(usage, wave.page_size)
            found = usage.pages_moved * wave.page_size + usage.decode_cached_tokens
            if found != pages * wave.page_size:
                raise DemoError(
                    f"{wave.title}: request {index} has {pages} pages of {wave.page_size} tokens, "
                    f"but {usage.pages_moved} were moved and {usage.decode_cached_tokens} tokens "
                    f"found in the cache ({usage.prefill_retries} transfers were retried)"
                )
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


async def _has_chat_template(client: AsyncClient) -> bool:
    try:
        await client.tokenize_chat(_messages(QUESTIONS[0]))
    except InvalidRequestError:  # then use plain text, whose errors will show
        return False
    return True


def _messages(question: str) -> list[Message]:
    return [Message(role="user", content=f"{DOCUMENT}\n\nQuestion: {question}")]


def _open_stream(client: AsyncClient, is_chat: bool, question: str) -> AsyncStream:
    options = SamplingOptions(max_tokens=MAX_TOKENS, temperature=0.0, stop=STOP)
    if is_chat:
        return client.stream_chat(_messages(question), **options)
    return client.stream(f"{DOCUMENT}\n\nQuestion: {question}\nAnswer:", **options)


async def _ask(client: AsyncClient, is_chat: bool, console: Console) -> tuple[Completion, ...]:
    answers = [""] * len(QUESTIONS)
    with Live(console=console, refresh_per_second=8) as live:

        async def answer(index: int) -> Completion:
            stream = _open_stream(client, is_chat, QUESTIONS[index])
            async with stream:
                async for delta in stream:
                    answers[index] += delta.text
                    live.update(answers_table(answers))
            return stream.completion

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(index)) for index in range(len(QUESTIONS))]
        except ExceptionGroup as failed:
            first = failed.exceptions[0]  # the others were cancelled with it, or are similar
            raise first from first.__cause__
    console.print()
    return tuple(task.result() for task in tasks)


def answers_table(answers: Sequence[str]) -> Table:
    """Draw the answers so far, one row per question."""
    table = Table(show_header=False, box=None, expand=True)
    table.add_column(width=len(str(len(answers) - 1)))
    table.add_column(width=max(map(len, QUESTIONS)), style="bold")
    table.add_column(ratio=1)  # what is left of the line
    for index, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True)):
        table.add_row(str(index), question, escape(" ".join(answer.split())))
    return table
