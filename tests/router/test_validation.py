import math
from typing import Any

import pytest

from pagewire.protos.token_ids import pack_token_ids
from router.errors import InvalidRequest, PromptTooLong, UnknownModel
from router.request import AskedSampling, Sampling, SamplingDefaults, ServedModel
from router.validation import (
    check_model,
    check_packed_token_ids,
    check_prompt,
    check_text,
    complete_sampling,
    end_token_ids,
)

MODEL = ServedModel(
    name="tiny",
    fingerprint="f",
    vocab_size=100,
    max_context_tokens=32,
    page_size=4,
    eos_token_ids=(2, 3),
)


def complete(
    asked: AskedSampling,
    *,
    defaults: SamplingDefaults | None = None,
    prompt_len: int = 10,
    has_tokenizer: bool = True,
) -> Sampling:
    return complete_sampling(
        asked,
        defaults=defaults or SamplingDefaults(),
        model=MODEL,
        prompt_len=prompt_len,
        has_tokenizer=has_tokenizer,
        draw_seed=lambda: 77,
    )


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("temperature", -0.1, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("temperature", math.inf, "temperature"),
        ("temperature", 1e-30, "temperature"),
        ("temperature", 1e30, "temperature"),
        ("top_p", 0.0, "top_p"),
        ("top_p", 1.01, "top_p"),
        ("top_p", -1.0, "top_p"),
        ("top_p", math.nan, "top_p"),
        ("top_k", -1, "top_k"),
        ("min_p", -0.1, "min_p"),
        ("min_p", 1.1, "min_p"),
        ("min_p", math.nan, "min_p"),
        ("repetition_penalty", 0.0, "repetition_penalty"),
        ("repetition_penalty", -1.0, "repetition_penalty"),
        ("repetition_penalty", math.inf, "repetition_penalty"),
        ("repetition_penalty", 1e-40, "repetition_penalty"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("presence_penalty", math.nan, "presence_penalty"),
        ("frequency_penalty", -2.5, "frequency_penalty"),
        ("frequency_penalty", -math.inf, "frequency_penalty"),
        ("seed", -1, "seed"),
        ("seed", 2**64, "seed"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -5, "max_tokens"),
        ("min_tokens", 23, "min_tokens"),
        ("n", 0, "n"),
        ("n", 65, "n"),
        ("logprobs", 21, "logprobs"),
        ("logprobs", -1, "logprobs"),
        ("stop", ("",), "stop[0]"),
        ("stop", ("a", ""), "stop[1]"),
        ("stop", ("x" * 1025,), "stop[0]"),
        ("stop", tuple("abcdefghijklmnopq"), "stop"),
        ("stop_token_ids", (5, 100), "stop_token_ids[1]"),
        ("stop_token_ids", (-1,), "stop_token_ids[0]"),
        ("stop_token_ids", (1,) * 257, "stop_token_ids"),
    ],
)
def test_a_bad_sampling_value_is_refused_with_field_found_and_allowed(
    field: str, value: Any, named: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(AskedSampling(**{field: value}))

    assert caught.value.field == f"sampling.{named}"
    assert caught.value.found
    assert caught.value.allowed


@pytest.mark.parametrize(
    "asked",
    [
        AskedSampling(min_tokens=6, max_tokens=5),
        AskedSampling(min_tokens=1, stop_token_ids=tuple(range(100))),
        AskedSampling(min_tokens=1, ignore_eos=True, stop_token_ids=tuple(range(100))),
    ],
)
def test_contradictory_values_are_refused(asked: AskedSampling) -> None:
    with pytest.raises(InvalidRequest):
        complete(asked)


@pytest.mark.parametrize(
    "asked",
    [
        AskedSampling(),
        AskedSampling(temperature=0.0, top_p=1.0, min_p=1.0, top_k=0),
        AskedSampling(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.3),
        AskedSampling(seed=2**64 - 1, n=64, logprobs=20, max_tokens=2**32 - 1),
        AskedSampling(min_tokens=5, max_tokens=5),
        AskedSampling(stop=tuple("abcdefghijklmnop"), stop_token_ids=(0, 99)),
    ],
)
def test_values_at_their_limits_are_accepted(asked: AskedSampling) -> None:
    complete(asked)


def test_stop_strings_without_a_tokenizer_are_refused_with_a_way_out() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        complete(AskedSampling(stop=("x",)), has_tokenizer=False)


def test_unset_values_come_from_the_model_folder_then_from_the_contract() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=50)

    sampling = complete(AskedSampling(top_k=7), defaults=defaults)

    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 7)
    assert (sampling.min_p, sampling.n, sampling.logprobs, sampling.seed) == (0.0, 1, None, 77)
    assert sampling.max_tokens == 22, "as many as the context holds"


def test_a_zero_that_is_set_is_not_a_default() -> None:
    sampling = complete(
        AskedSampling(temperature=0.0, seed=0, logprobs=0),
        defaults=SamplingDefaults(temperature=0.7),
    )

    assert (sampling.temperature, sampling.seed, sampling.logprobs) == (0.0, 0, 0)


def test_max_tokens_ends_where_the_context_ends() -> None:
    assert complete(AskedSampling(max_tokens=1000), prompt_len=30).max_tokens == 2


def test_top_k_of_the_whole_vocabulary_is_off() -> None:
    assert complete(AskedSampling(top_k=100)).top_k == 0


def test_end_tokens_are_eos_and_stop_tokens_unless_eos_is_ignored() -> None:
    both = complete(AskedSampling(stop_token_ids=(9,)))
    only_stop = complete(AskedSampling(stop_token_ids=(9,), ignore_eos=True))

    assert end_token_ids(both, MODEL) == {2, 3, 9}
    assert end_token_ids(only_stop, MODEL) == {9}


def test_an_unknown_model_is_refused_and_an_empty_name_is_the_only_model() -> None:
    check_model("", MODEL)
    check_model("tiny", MODEL)

    with pytest.raises(UnknownModel, match="'tiny'"):
        check_model("other", MODEL)


@pytest.mark.parametrize(
    ("token_ids", "field", "kind"),
    [
        ([], "prompt", InvalidRequest),
        ([1] * 32, "prompt", PromptTooLong),
        ([1] * 33, "prompt", PromptTooLong),
        ([1, 100], "prompt.token_ids[1]", InvalidRequest),
        ([2**32 - 1], "prompt.token_ids[0]", InvalidRequest),
    ],
)
def test_a_bad_prompt_is_refused(
    token_ids: list[int], field: str, kind: type[InvalidRequest]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_prompt(pack_token_ids(token_ids), MODEL)

    assert (caught.value.field, type(caught.value)) == (field, kind)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    check_prompt(pack_token_ids([99] * 31), MODEL)


def test_packed_token_ids_must_be_whole() -> None:
    check_packed_token_ids("prompt.token_ids", b"\x01\x00\x00\x00\x00\x01\x00\x00")
    with pytest.raises(InvalidRequest, match="multiple of 4"):
        check_packed_token_ids("prompt.token_ids", b"\x01\x00\x00")


@pytest.mark.parametrize("text", ["", "x" * 11])
def test_text_that_is_empty_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        check_text("prompt.text", text, 10)
