"""Chat templates in their child processes; real ones, with small limits."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from router import child_pool
from router.chat_renderer import ChildRenderer, check_template
from router.chat_template import ChatTemplate
from router.child_pool import ChildLimits
from router.config import RouterConfig
from router.errors import (
    ChatTemplateError,
    ModelFolderError,
    Overloaded,
    RefusedByTemplate,
    RenderingTooLong,
    TemplateLimit,
    WrongTools,
)
from router.model_folder import read_model_folder
from router.router import Router
from tests.router.tokenizers_for_tests import byte_level
from tests.support.wall_clock import assert_within

ROOT = Path(__file__).parents[2]
SMALL = ChildLimits(cpu_s=0.2, wall_s=30, memory_bytes=64 << 20)
# What a template can do in spite of the sandbox. A chat says what to do, as `attack`: what depends
# on no chat Jinja computes when it compiles.
ATTACKS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "format": "{{ '{:>1000000000}'.format(attack) | length }}",
    "indent": "{{ ((attack ~ '\n' * 1000) | indent(100000000, blank=true)) | length }}",
    "replace": "{{ (attack * 1000) | replace('e', 'y' * 100000) | length }}",
    "join": "{{ range(99999) | join(attack * 1000) | length }}",
    "batch": "{{ [attack] | batch(100000000, 2) | list | length }}",
    "slice": "{{ [attack] | slice(100000000) | list | length }}",
    "doubling": "{% set ns = namespace(x=attack) %}"
    "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}",
}
SOURCE = "{% set attack = messages[0].content %}"
for name, text in ATTACKS.items():
    SOURCE += f"{{% if attack == '{name}' %}}{text}{{% endif %}}"
SOURCE += (
    "{% if attack == 'no' %}{{ raise_exception('not for me') }}{% endif %}"
    "{% if attack == 'wrong' %}{{ messages[9].content }}{% endif %}"
    "{% if attack == 'no text' %}{{ '\\ud800' }}{% endif %}"
    "{{ bos }}{{ attack | upper }}"
)


def template(source: str = SOURCE) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos": "<s>"}, max_chars=100_000)


def chat(content: str = "hi") -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@asynccontextmanager
async def started(source: str = SOURCE, **options: Any) -> AsyncIterator[ChildRenderer]:
    renderer = ChildRenderer(template(source), limits=SMALL, **options)
    try:
        await renderer.start()
        yield renderer
    finally:
        await renderer.close()
        assert not children(), "none is left"


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if is_chat_child(each)]


def is_chat_child(process: psutil.Process) -> bool:
    try:
        return "chat_child" in str(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended since, as another test's process may at any time
        return False


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def longest_gap(gaps: list[float]) -> None:
    """Note how long the event loop was held up, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(0.005)
        gaps.append(loop.time() - before)


def test_no_attack_passes_the_limits_or_holds_up_the_event_loop() -> None:
    async def scenario() -> None:
        async with started() as renderer:
            gaps: list[float] = []
            watching = asyncio.create_task(longest_gap(gaps))
            for attack in ATTACKS:
                with pytest.raises(TemplateLimit, match=r"processor time|of memory"):
                    await renderer.render(chat(attack))
                assert await renderer.render(chat(attack + "?")) == f"<s>{attack.upper()}?"
            watching.cancel()
            assert_within(max(gaps), 1)  # an attack in this process takes longer

    run(scenario)


def test_what_a_template_says_comes_back_as_from_the_template_itself() -> None:
    async def scenario() -> None:
        async with started(num_children=1) as renderer:
            [child] = children()
            assert await renderer.render(chat("größe 😀")) == "<s>GRÖSSE 😀"
            with pytest.raises(RefusedByTemplate, match=r"^not for me$"):
                await renderer.render(chat("no"))
            with pytest.raises(ChatTemplateError, match=r"failed: UndefinedError"):
                await renderer.render(chat("wrong"))
            assert await renderer.render(chat("no text")) == "\\ud800<s>NO TEXT"
            with pytest.raises(RenderingTooLong, match=r"more than 100000 characters"):
                await renderer.render(chat("x" * 100_001))
            assert children() == [child], "it was kept all the time"

    run(scenario)


def test_tools_and_calls_reach_the_template_in_the_child_and_wrong_ones_leave_it_alive() -> None:
    source = (
        "{{ tools[0].function.name if tools }} {{ messages[0].tool_calls[0].function.arguments.a }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    asked = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "größe"}}]

    async def scenario() -> None:
        async with started(source, num_children=1) as renderer:
            [child] = children()
            assert await renderer.render(asked, json.dumps(tools)) == "größe é"
            assert await renderer.render(asked) == " é"
            for wrong in ("[" * 100_000, "[1]", "{", "1" * 10_000):
                with pytest.raises(WrongTools):
                    await renderer.render(asked, wrong)
            assert children() == [child], "it was kept all the time"

    run(scenario)


def test_half_a_character_that_a_model_wrote_into_a_call_stays_the_escape_that_it_was() -> None:
    arguments = '{"a": "\\ud83d", "\\ude00": "\\ud83d\\ude00"}'
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = [{"role": "assistant", "content": "", "tool_calls": [call]}]

    async def scenario() -> None:
        source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
        async with started(source) as renderer:
            assert await renderer.render(asked) == r'{"a": "\ud83d", "\ude00": "😀"}'

    run(scenario)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ 'x' | nonsense }}", "does not compile: .*nonsense"),
        (
            "{{ " + "'xxxxxxxx' | " + " | ".join(["replace('x', 'xxxxxxxx')"] * 12) + " }}",
            "more than",
        ),
        (ATTACKS["loops"], "processor time"),
    ],
    ids=["unknown filter", "constant", "endless"],
)
def test_a_template_that_cannot_be_used_is_refused_at_the_start(source: str, error: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ChatTemplateError, match=error):
            async with started(source, num_children=1):
                pass

    run(scenario)


def test_a_template_that_nobody_can_use_stops_the_start_of_a_router(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ 'x' | nonsense }}")

    async def scenario() -> None:
        router = Router(
            config=RouterConfig(),
            model_dir=tmp_path,
            connect_channel=grpc.aio.insecure_channel,
            random_id=lambda: "0" * 32,
        )
        with pytest.raises(ModelFolderError, match=f"chat template of {tmp_path}.*nonsense"):
            await router.start()
        assert not children()

    run(scenario)
    folder = read_model_folder(tmp_path, max_prompt_chars=100)
    assert folder.chat_template is not None
    with pytest.raises(ChatTemplateError, match="nonsense"):
        check_template(folder.chat_template)


def test_a_template_that_wants_other_chats_than_the_probe_is_none_the_worse() -> None:
    async def scenario() -> None:
        refusing = "{{ raise_exception('no') if messages | length < 2 }}{{ messages[1].content }}"
        async with started(refusing, num_children=1) as renderer:
            assert await renderer.render(chat() + chat("two")) == "two"
        async with started("{{ messages[1].content | trim }}", num_children=1) as renderer:
            assert await renderer.render(chat() + chat("two")) == "two"

    run(scenario)


def test_a_caller_that_leaves_and_a_child_that_is_killed_cost_nobody_an_answer() -> None:
    async def scenario() -> None:
        async with started(num_children=1) as renderer:
            leaving = asyncio.create_task(renderer.render(chat("loops")))
            await asyncio.sleep(0.05)
            leaving.cancel()
            assert await renderer.render(chat()) == "<s>HI", "after the child was replaced"
            [child] = children()
            child.kill()
            while child.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
            assert await renderer.render(chat()) == "<s>HI"

    run(scenario)


def test_more_chats_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_pool, "MAX_WAITING", 2)

    async def scenario() -> None:
        async with started(num_children=1) as renderer:
            busy = asyncio.create_task(renderer.render(chat("loops")))
            await asyncio.sleep(0.05)
            waiting = [asyncio.create_task(renderer.render(chat())) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="2 chats wait"):
                await renderer.render(chat())
            with pytest.raises(TemplateLimit):
                await busy
            assert await asyncio.gather(*waiting) == ["<s>HI"] * 2

    run(scenario)


def test_a_child_inherits_no_secret_and_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "secret")

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            os.set_inheritable(listener.fileno(), True)
            async with started(num_children=1):
                [child] = children()
                assert "SECRET" not in child.environ()
                assert not child.net_connections(kind="inet")
                assert child.num_fds() == 3
                assert child.memory_info().rss < 40 << 20
                assert child.cwd() == "/"

    run(scenario)


PARENT = """
import asyncio, sys
from router.chat_renderer import ChildRenderer
from router.child_pool import ChildLimits
from router.chat_template import ChatTemplate

async def main():
    source = "{% if messages[0].content == 'x' %}" + sys.argv[1] + "{% endif %}"
    template = ChatTemplate(source, special_tokens={}, max_chars=9)
    renderer = ChildRenderer(template, limits=ChildLimits(cpu_s=0.2))
    await renderer.start()
    busy = asyncio.create_task(renderer.render([{"role": "user", "content": "x"}]))
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_children_end_with_a_router_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, ATTACKS["loops"]]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        family = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
    assert len(family) == 2

    _, alive = psutil.wait_procs(family, timeout=20)
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    assert not alive


def test_a_child_starts_quickly_and_imports_little() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import router.chat_child;"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    import jinja2

    site = str(Path(jinja2.__file__).parents[1])
    before = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT), site],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert_within(time.monotonic() - before, 10)
    assert "jinja2" in out
    assert not {"grpc", "google", "tokenizers", "asyncio", "kv_cache", "ray", "numpy"} & set(out)
