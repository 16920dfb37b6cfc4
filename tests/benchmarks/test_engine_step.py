"""Which passes of prompts the benchmark of one engine times."""

from types import SimpleNamespace
from typing import Any

from benchmarks.engine_step import PROMPTS, Prompts, ends_of_prompts


def engine_of(num_pages: int) -> Any:
    """Return what of an engine the cases look at."""
    return SimpleNamespace(
        layout=SimpleNamespace(page_size=64), storage=SimpleNamespace(num_pages=num_pages)
    )


def test_prompts_of_a_pass_share_no_page_and_draw_after_their_last_token() -> None:
    prompts = Prompts(1, 1023, 32)
    slices = ends_of_prompts(engine_of(prompts.num_pages(64) + 1), prompts)

    assert prompts.name == "prefill/32x1@1023"
    assert len(slices) == 32
    assert len({page_id for each in slices for page_id in each.page_ids}) == 32 * 16
    for each in slices:
        assert (len(each.token_ids), each.start, each.num_prompt_tokens) == (1, 1023, 1024)
        assert [draw.position for draw in each.draws] == [1024]


def test_a_burst_of_cached_prompts_is_among_the_cases_and_names_are_unique() -> None:
    names = [each.name for each in PROMPTS]

    assert {"prefill/1@1023", "prefill/32x1@1023", "prefill/2048@0"} <= set(names)
    assert len(set(names)) == len(names)
