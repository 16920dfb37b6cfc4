from typing import Any

import pytest

from router.errors import WrongDelta
from router.generation import Delta, Finish, Output, WorkerStats
from tests.router.generations import EOS, generation, ids


def delta(
    first: int, token_ids: list[int], *, choice: int = 0, attempt: int = 0, **fields: object
) -> Delta:
    return Delta(
        attempt=attempt,
        choice=choice,
        first_index=first,
        token_ids=token_ids,
        **fields,  # type: ignore[arg-type]
    )


def test_what_the_client_has_not_taken_merges_into_one_output_per_choice() -> None:
    made = generation(n=2)
    for index, token_id in enumerate(ids("the")):
        made.accept(delta(index, [token_id]), 11.0)
    made.accept(delta(0, ids("fox"), choice=1), 11.0)

    assert [(o.choice, o.first_index, o.text) for o in made.take_outputs()] == [
        (0, 0, "the"),
        (1, 0, "fox"),
    ]
    assert made.take_outputs() == []
    made.accept(delta(len(ids("the")), ids(" dog")), 12.0)
    [output] = made.take_outputs()
    assert (output.first_index, output.token_ids) == (len(ids("the")), ids(" dog"))


def test_a_choice_that_stopped_takes_nothing_more_while_others_go_on() -> None:
    made = generation(n=2, stop=("END",))
    head, tail = ids("a END b"), ids("c END d")

    made.accept(delta(0, head), 11.0)
    outputs = made.take_outputs()
    made.accept(delta(len(outputs[0].token_ids), tail), 12.0)
    made.accept(delta(99, tail), 12.0)  # not even a gap counts any more
    made.accept(delta(0, ids("x"), choice=1), 12.0)

    assert (outputs[0].text, outputs[0].finish, outputs[0].stopped_by) == (
        "a ",
        Finish.STOP,
        "END",
    )
    assert len(outputs[0].token_ids) < len(head), "tokens after the stop string are not delivered"
    assert [(o.choice, o.text) for o in made.take_outputs()] == [(1, "x")]
    assert not made.is_finished
    assert made.is_running_at_worker
    assert made.take_stopped() == [0]
    assert made.take_stopped() == [], "the worker is told once"


def test_a_stop_string_within_the_first_min_tokens_ends_nothing() -> None:
    early, later = ids("END of "), ids("it END x")
    for pieces in ([early + later], [[each] for each in early + later]):
        made = generation(stop=("END",), min_tokens=len(early))
        for piece in pieces:
            made.accept(delta(made.num_tokens, piece), 11.0)

        [output] = made.take_outputs()
        assert (output.text, output.finish, output.stopped_by) == ("END of it ", Finish.STOP, "END")


def test_a_stop_string_that_begins_before_min_tokens_is_text() -> None:
    tokens = ids("END")
    made = generation(stop=("END",), min_tokens=len(tokens))

    made.accept(delta(0, tokens, finish=Finish.LENGTH), 11.0)

    [output] = made.take_outputs()
    assert (output.text, output.finish, output.stopped_by) == ("END", Finish.LENGTH, "")


def test_a_stop_token_that_is_plain_text_is_not_part_of_the_text() -> None:
    [dot] = ids(".")
    made = generation(end_ids=(EOS, dot))

    made.accept(delta(0, [*ids("the fox"), dot], finish=Finish.STOP), 11.0)

    [output] = made.take_outputs()
    assert output.text == "the fox"
    assert output.token_ids[-1] == dot
    assert output.stopped_by == "."
    assert made.is_finished
    assert not made.is_running_at_worker


def test_at_the_length_limit_an_end_token_is_ordinary_text() -> None:
    [dot] = ids(".")
    made = generation(end_ids=(dot,))

    made.accept(delta(0, [*ids("the"), dot], finish=Finish.LENGTH), 11.0)

    [output] = made.take_outputs()
    assert (output.text, output.finish, output.stopped_by) == ("the.", Finish.LENGTH, "")


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    made = generation()
    made.accept(delta(0, ids("😀")[:1], finish=Finish.LENGTH), 11.0)

    [output] = made.take_outputs()
    assert output.text == "\ufffd"


def test_a_finish_without_new_tokens_finishes() -> None:
    made = generation()
    made.accept(delta(0, ids("the")), 11.0)
    made.accept(delta(len(ids("the")), [], finish=Finish.STOP), 11.5)

    assert made.is_finished
    [output] = made.take_outputs()
    assert (output.text, output.finish) == ("the", Finish.STOP)


def test_an_end_before_tokens_that_came_is_wrong() -> None:
    made = generation()
    made.accept(delta(0, ids("the dog")), 11.0)

    with pytest.raises(WrongDelta, match="found its end after 1 tokens; allowed: "):
        made.accept(delta(0, ids("the")[:1], finish=Finish.STOP), 11.0)

    assert not made.is_finished


def test_a_gap_takes_nothing() -> None:
    made = generation()
    made.accept(delta(0, ids("the")), 11.0)
    before = list(made.choices[0].token_ids)

    with pytest.raises(WrongDelta, match="missing"):
        made.accept(delta(len(before) + 1, ids("fox")), 11.0)

    assert made.choices[0].token_ids == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"token_ids": [5] * 4}, "found 5 tokens; allowed: at most 4"),
        (
            {"token_ids": [5, 6], "logprobs": [None]},
            "found 1 log prob.*; allowed: 2, one per token",
        ),
    ],
)
def test_a_delta_with_more_than_its_choice_may_have_takes_nothing(
    wrong: dict[str, Any], told: str
) -> None:
    made = generation(max_tokens=4)
    made.accept(delta(0, [7]), 11.0)

    with pytest.raises(WrongDelta, match=told):
        made.accept(delta(1, **wrong), 11.0)

    assert made.choices[0].token_ids == [7]
    made.accept(delta(1, [5, 6, 7], finish=Finish.LENGTH), 11.0)
    assert made.is_finished


def test_single_tokens_beyond_the_most_are_not_taken_quickly() -> None:
    made = generation(max_tokens=2)
    [choice] = made.choices

    taken = [made.add_token(choice, 5, index, 11.0) for index in range(3)]

    assert taken == [True, False, False], "the last one ends the choice"


def test_stale_attempts_and_unknown_choices_are_not_accepted() -> None:
    made = generation()
    made.begin_attempt("decode-1")

    assert not made.accept(delta(0, ids("x"), attempt=0), 11.0)
    assert not made.accept(delta(0, ids("x"), attempt=2), 11.0)
    assert not made.accept(delta(0, ids("x"), attempt=1, choice=1), 11.0)
    assert made.accept(delta(0, ids("x"), attempt=1), 11.0)


def test_the_newest_stats_of_an_attempt_replace_its_earlier_ones() -> None:
    made = generation(stop=("END",))
    made.accept(delta(0, ids("x"), stats=WorkerStats(pages_moved=2)), 11.0)
    made.accept(delta(1, ids("y"), stats=WorkerStats(pages_moved=2, preemptions=1)), 11.0)
    made.accept(delta(2, ids("END")), 11.0)

    assert made.is_finished
    assert made.stats == WorkerStats(pages_moved=2, preemptions=1)


def test_stats_sum_over_attempts_but_what_one_of_them_computed_was_not_found() -> None:
    made = generation()
    earlier = WorkerStats(pages_moved=2, bytes_moved=20, cached_tokens=5)
    made.accept(delta(0, ids("x"), stats=earlier), 11.0)
    made.begin_attempt("decode-1")
    made.begin_attempt("decode-0")  # the second one tells nothing
    last = WorkerStats(pages_moved=3, cached_tokens=9)
    made.accept(delta(1, [EOS], attempt=2, finish=Finish.STOP, stats=last), 12)

    assert made.stats == WorkerStats(pages_moved=5, bytes_moved=20, cached_tokens=5)


def test_timings_are_measured_from_arrival_and_over_the_longest_choice() -> None:
    made = generation(n=2)
    made.accept(delta(0, [50]), 11.0)
    made.accept(delta(0, [50], choice=1, finish=Finish.LENGTH), 12.0)
    made.accept(delta(1, [50, 51, 52, 53], finish=Finish.LENGTH), 13.0)

    timings = made.timings()

    assert (timings.ttft_ms, timings.total_ms, timings.tpot_ms) == (1000.0, 3000.0, 500.0)


def test_outputs_are_independent_objects() -> None:
    assert Output(0, 0).token_ids is not Output(0, 0).token_ids
