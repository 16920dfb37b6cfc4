"""A stop string ends the text before it, however the text is cut, and costs little."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from router.stop_strings import StopStrings


def run(stop: list[str], pieces: list[str]) -> tuple[str, str]:
    """Return all text that was let through, and the stop string."""
    stop_strings = StopStrings(stop)
    text = ""
    for piece in pieces:
        result = stop_strings.push(piece)
        text += result.text
        if result.stopped_by:
            return text, result.stopped_by
    return text + stop_strings.finish(), ""


def naive(stop: list[str], text: str) -> tuple[str, str]:
    for end in range(len(text) + 1):
        ending = [each for each in stop if text[:end].endswith(each)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@settings(max_examples=500)
@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=8), max_size=4),
    st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
)
def test_the_result_is_that_of_looking_at_the_whole_text(
    stop: list[str], pieces: list[str]
) -> None:
    assert run(stop, pieces) == naive(stop, "".join(pieces))


@settings(max_examples=300)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(alphabet="abx", max_size=4), max_size=12),
)
def test_nothing_of_a_stop_string_is_ever_sent_and_little_is_held(
    stop: list[str], pieces: list[str]
) -> None:
    stop_strings = StopStrings(stop)
    sent, seen = "", ""
    for piece in pieces:
        seen += piece
        result = stop_strings.push(piece)
        sent += result.text
        if result.stopped_by:
            assert seen.startswith(sent + result.stopped_by)
            return
        assert seen.startswith(sent)
        assert len(seen) - len(sent) < max(len(each) for each in stop)


def test_a_stop_string_across_three_pieces_is_found() -> None:
    assert run(["</end>"], ["text</", "en", "d>more"]) == ("text", "</end>")


def test_text_that_only_looked_like_a_stop_string_comes_later() -> None:
    stop_strings = StopStrings(["###"])

    assert stop_strings.push("a##").text == "a"
    assert stop_strings.push("b").text == "##b"


def test_stop_strings_that_nearly_come_take_no_longer_than_others() -> None:
    near = ["a" * 1023 + "b", *("b" + "a" * 1022 + chr(ord("c") + i) for i in range(15))]
    stop = StopStrings(near)
    begun_at = time.process_time()

    text = "".join(stop.push("a").text for _ in range(5000)) + stop.finish()

    assert text == "a" * 5000
    assert time.process_time() - begun_at < 2, "0.4 ms a token, of which a router has thousands"
