"""A trained model answers as in transformers, through whole clusters."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cli.demo_text import DOCUMENT
from cluster.demo_model import TOKENIZER_TEXT
from llm_engine.model_files import text_folder
from tests.cluster.in_process import generate_all, in_process_cluster
from tests.support.trained_model import GROUP, GreedyCheck, trained_path

pytestmark = [pytest.mark.xdist_group(GROUP), pytest.mark.timeout(300)]

MAX_TOKENS = 8
PAGE_SIZE = 16
# These begin alike: each is the beginning of the one before. A step computes 256 tokens.
LONG = (4000, 2000, 1000)
SHORT = (5, 7, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 100)


def prompts() -> list[list[int]]:
    """Cut prompts of these lengths from texts that do not change."""
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokenizer = Tokenizer.from_file(str(text_folder(trained_path()) / "tokenizer.json"))
    text = "\n\n".join((DOCUMENT, license_text, TOKENIZER_TEXT, DOCUMENT))
    ids: list[int] = tokenizer.encode(text).ids
    return [ids[:length] for length in LONG] + [
        ids[50 * index : 50 * index + length] for index, length in enumerate(SHORT)
    ]


def answers(asked: list[list[int]], num_prefill: int, num_decode: int) -> list[list[int]]:
    async def scenario():
        cluster = in_process_cluster(
            trained_path(),
            num_prefill=num_prefill,
            num_decode=num_decode,
            page_size=PAGE_SIZE,
            num_pages=600,
            chunk_pages=16,
            is_large=True,
        )
        async with cluster as client:
            return await generate_all(client, asked, max_tokens=MAX_TOKENS)

    completions = asyncio.run(scenario())

    assert all(each.usage.decode_computed_tokens == 0 for each in completions)
    assert sum(each.usage.bytes_moved for each in completions) > 0
    for prompt, each in zip(asked, completions, strict=True):
        pages = each.usage.pages_moved * PAGE_SIZE + each.usage.decode_cached_tokens
        assert pages == -(-len(prompt) // PAGE_SIZE) * PAGE_SIZE
    return [list(each.token_ids) for each in completions]


def check_equal_those_of_transformers(asked: list[list[int]], answered: list[list[int]]) -> None:
    check = GreedyCheck()
    for prompt, answer in zip(asked, answered, strict=True):
        assert check.greedy_after(prompt, answer)[:-1] == answer, f"{len(prompt)} tokens"


@pytest.mark.thorough  # models of random weights go the same way in each run
def test_greedy_answers_to_prompts_of_up_to_4000_tokens_equal_those_of_transformers() -> None:
    asked = prompts()
    assert all(long[: len(short)] == short for long, short in pairwise(asked[: len(LONG)]))

    small = answers(asked, 1, 1)
    large = answers(asked, 2, 2)

    check_equal_those_of_transformers(asked, small)
    assert large == small
