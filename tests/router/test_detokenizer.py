import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.detokenizer import Detokenizer
from router.tokenizer import Tokenizer
from tests.router.tokenizers_for_tests import byte_fallback, byte_level

BYTE_LEVEL = Tokenizer(byte_level().to_str())
BYTE_FALLBACK = Tokenizer(byte_fallback().to_str())
NUM_BYTE_LEVEL = byte_level().get_vocab_size()
FIRST_BYTE, FIRST_PIECE = 3, 3 + 256  # ids of byte_fallback
NUM_BYTE_FALLBACK = byte_fallback().get_vocab_size()

TEXTS = st.text(
    alphabet=st.sampled_from("the quickzäöß€日本東😀👩‍🇯\ufffd \n") | st.characters(codec="utf-8"),
    max_size=40,
)

SIZES = st.integers(1, 6)  # tokens that come together


def stream(tokenizer: Tokenizer, token_ids: list[int], size: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    parts = [token_ids[first : first + size] for first in range(0, len(token_ids), size)]
    return [*map(detokenizer.push, parts), detokenizer.finish()]


@settings(max_examples=300)
@given(st.lists(st.integers(0, NUM_BYTE_LEVEL + 5), max_size=80), SIZES)
def test_any_byte_level_tokens_stream_to_the_text_of_a_full_decode(
    token_ids: list[int], size: int
) -> None:
    # Random ids make mostly malformed bytes, and some ids are special or unknown.
    assert "".join(stream(BYTE_LEVEL, token_ids, size)) == BYTE_LEVEL.decode(token_ids)


def test_a_token_that_has_its_own_text_is_decoded_once_for_all_streams() -> None:
    tokenizer = Tokenizer(byte_level().to_str())
    token_ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    assert "".join(stream(tokenizer, token_ids)) == "the quick brown fox"

    tokenizer.decode = lambda *_, **__: pytest.fail("it was decoded before")  # type: ignore[method-assign]

    assert "".join(stream(tokenizer, token_ids)) == "the quick brown fox"


def test_only_whole_characters_of_a_byte_level_tokenizer_are_a_tokens_own_text() -> None:
    [begin, *half] = BYTE_LEVEL.encode("€", add_special_tokens=True)
    [word] = BYTE_LEVEL.encode("the", add_special_tokens=False)
    unknown = NUM_BYTE_LEVEL + 5

    assert BYTE_LEVEL.own_texts[word] == "the"
    assert len(half) > 1
    assert [BYTE_LEVEL.own_texts[each] for each in (begin, half[0], unknown)] == [None] * 3
    assert BYTE_FALLBACK.own_texts[NUM_BYTE_FALLBACK - 1] is None, "it may lose its blank"


@settings(max_examples=200)
@given(TEXTS, st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]), SIZES)
def test_encoded_text_streams_back_whole(text: str, tokenizer: Tokenizer, size: int) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=True)

    pieces = stream(tokenizer, token_ids, size)

    assert "".join(pieces) == tokenizer.decode(token_ids)


@settings(max_examples=200)
@given(st.text(alphabet="日本語😀é", min_size=1, max_size=20), SIZES)
def test_no_piece_holds_half_a_character(text: str, size: int) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False)

    pieces = stream(BYTE_LEVEL, token_ids, size)

    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == "", "complete characters do not wait for the end"


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.text(alphabet="日😀é", min_size=1, max_size=3).map(
                lambda text: [FIRST_BYTE + byte for byte in text.encode()]
            ),
            st.integers(FIRST_PIECE, NUM_BYTE_FALLBACK - 1).map(lambda piece: [piece]),
            st.integers(0, 2).map(lambda special: [special]),
        ),
        max_size=30,
    ),
    SIZES,
)
def test_byte_fallback_streams_well_formed_runs_like_a_full_decode(
    runs: list[list[int]], size: int
) -> None:
    token_ids = [token_id for run in runs for token_id in run]

    assert "".join(stream(BYTE_FALLBACK, token_ids, size)) == BYTE_FALLBACK.decode(token_ids)


def test_a_malformed_run_keeps_the_characters_that_were_sent() -> None:
    sent = [FIRST_BYTE + byte for byte in "é".encode()]

    pieces = stream(BYTE_FALLBACK, [*sent, FIRST_BYTE + 0xFF, FIRST_PIECE + 1])

    assert "".join(pieces) == "é\ufffda"


def test_a_blank_that_turns_malformed_is_not_sent_twice() -> None:
    token_ids = [FIRST_PIECE + 1, FIRST_BYTE + 0x20, FIRST_BYTE + 0xFF, FIRST_PIECE + 1]

    assert "".join(stream(BYTE_FALLBACK, token_ids)) == "a \ufffda"


def test_endless_garbage_is_sent_in_time_and_in_bounded_work() -> None:
    class Counting:
        own_texts = BYTE_LEVEL.own_texts
        num_decoded = 0

        def has_text(self, token_id: int) -> bool:
            return True

        def decode(self, token_ids: list[int]) -> str:  # type: ignore[override]
            Counting.num_decoded += len(token_ids)
            return BYTE_LEVEL.decode(token_ids)

    garbage = BYTE_LEVEL._tokenizer.token_to_id("ÿ")  # byte 0xFF
    detokenizer = Detokenizer(Counting())

    pieces = [detokenizer.push([garbage]) for _ in range(2000)]

    assert len("".join(pieces)) > 1900
    assert Counting.num_decoded < 2000 * 200


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert "".join(stream(tokenizer, [0, 1, 0])) == ""


def test_half_a_character_holds_up_no_tokens_before_it() -> None:
    token_ids = BYTE_LEVEL.encode("the dog 日", add_special_tokens=False)
    detokenizer = Detokenizer(BYTE_LEVEL)

    assert detokenizer.push(token_ids[:-1]) == "the dog "
    assert detokenizer.push(token_ids[-1:]) == "日"


def test_an_ascii_token_is_sent_at_once() -> None:
    token_ids = BYTE_LEVEL.encode("the dog", add_special_tokens=False)

    pieces = stream(BYTE_LEVEL, token_ids)

    assert all(pieces[:-1])
