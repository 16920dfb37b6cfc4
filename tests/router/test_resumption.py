"""Another router goes on with a call: with the same tokens and text, for nobody who forges."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credentials.secret import KEY_BYTES
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from router.config import RouterConfig
from router.errors import InvalidRequest
from router.generation import Delta, Finish, Generation
from router.resumption import ReceivedChoice
from router.tokenizer import Tokenizer
from tests.router.generations import generation, ids
from tests.router.resumed_requests import asking, assert_refused, resuming
from tests.router.scripted_worker import (
    LENGTH,
    ScriptedWorker,
    running_router,
    tokens,
)
from tests.router.tokenizers_for_tests import TEXTS, byte_fallback, byte_level
from tests.support.virtual_time import run_virtual

GenerateRequest = inference_pb2.GenerateRequest

KEY = b"k" * KEY_BYTES


# What a generation does with what its client has.


def received(*outputs: Any, choice: int = 0, is_finished: bool = False) -> ReceivedChoice:
    """What a client has that took these outputs."""
    return ReceivedChoice(
        choice=choice,
        packed_token_ids=pack_token_ids([t for each in outputs for t in each.token_ids]),
        text_chars=sum(len(each.text) for each in outputs),
        is_finished=is_finished,
    )


def play(
    made: Generation, token_ids: list[int], sizes: list[int], finish: Finish = Finish.LENGTH
) -> list[Any]:
    """Feed tokens in pieces of these sizes, from where the generation is; return what comes out."""
    outputs = made.take_outputs()
    piece_sizes = itertools.chain(sizes, itertools.repeat(1))
    first = len(made.choices[0].token_ids)
    while first < len(token_ids) and not made.is_finished:
        piece = token_ids[first : first + next(piece_sizes)]
        is_last = first + len(piece) == len(token_ids)
        made.accept(
            Delta(
                attempt=made.attempt,
                choice=0,
                first_index=first,
                token_ids=piece,
                finish=finish if is_last else None,
            ),
            11.0,
        )
        outputs += made.take_outputs()
        first += len(piece)
    return outputs


def fresh(tokenizer: Tokenizer, max_tokens: int, stop: tuple[str, ...]) -> Generation:
    sampling = generation(stop=stop).request.sampling
    request = replace(
        generation().request, sampling=replace(sampling, max_tokens=max_tokens, stop=stop)
    )
    return Generation(request, tokenizer)


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@pytest.mark.parametrize("stop", [(), ("京 大", "dog emoji")], ids=["no-stop", "stop"])
def test_text_that_is_cut_anywhere_goes_on_as_if_it_were_not(
    kind: Any, stop: tuple[str, ...]
) -> None:
    tokenizer = Tokenizer(kind().to_str())
    token_ids = tokenizer.encode(" ".join(TEXTS), add_special_tokens=False)
    rng = random.Random(5)
    sizes = [rng.choice((1, 1, 2, 5)) for _ in token_ids]
    calm = play(_begun(fresh(tokenizer, len(token_ids), stop)), token_ids, sizes)
    text = "".join(each.text for each in calm)
    assert text
    assert (calm[-1].stopped_by != "") == bool(stop)

    for cut in range(len(calm)):
        before = calm[:cut]
        resumed = fresh(tokenizer, len(token_ids), stop)
        resumed.resume([received(*before)])
        after = play(_begun(resumed), token_ids, sizes[cut:])

        assert "".join(each.text for each in before + after) == text
        got = [each for output in before + after for each in output.token_ids]
        assert got == [each for output in calm for each in output.token_ids]
        assert (after[-1].finish, after[-1].stopped_by) == (calm[-1].finish, calm[-1].stopped_by)
        indices = [each.first_index for each in before + after if each.token_ids]
        assert indices == sorted(set(indices))


_FALLBACK = Tokenizer(byte_fallback().to_str())
_BYTES = [3 + byte for byte in (*"é€😀".encode(), 0x20, 0x41, 0xFF)]  # ids of byte_fallback
_PIECES = range(3 + 256, byte_fallback().get_vocab_size())


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(_BYTES) | st.sampled_from(_PIECES), min_size=1, max_size=25),
    st.lists(st.integers(1, 6), max_size=25),
    st.lists(st.integers(1, 6), max_size=25),
    st.integers(0, 25),
)
def test_text_of_malformed_bytes_goes_on_whatever_came_together(
    token_ids: list[int], sizes: list[int], other_sizes: list[int], cut: int
) -> None:
    calm = play(_begun(fresh(_FALLBACK, len(token_ids), ())), token_ids, [])
    text = "".join(each.text for each in calm)
    before = play(_begun(fresh(_FALLBACK, len(token_ids), ())), token_ids, sizes)[:cut]
    if before and before[-1].finish:
        before.pop()
    resumed = fresh(_FALLBACK, len(token_ids), ())
    resumed.resume([received(*before)])

    after = play(_begun(resumed), token_ids, other_sizes)

    assert "".join(each.text for each in before + after) == text


def _begun(made: Generation) -> Generation:
    made.begin_attempt("decode-0")
    return made


def test_a_client_that_has_no_text_gets_all_of_it() -> None:
    made = Generation(generation().request, Tokenizer(byte_level().to_str()))
    had = ids("the quick")

    made.resume([replace(received(), packed_token_ids=pack_token_ids(had))])

    [output] = made.take_outputs()
    assert (output.text, output.token_ids, output.first_index) == ("the quick", [], len(had))


def test_a_client_cannot_have_more_text_than_its_tokens_make() -> None:
    made = Generation(generation().request, Tokenizer(byte_level().to_str()))
    had = ids("the quick")
    claimed = replace(received(), packed_token_ids=pack_token_ids(had), text_chars=10)

    with pytest.raises(
        InvalidRequest, match=r"choices\[0\].text_chars: found 10; allowed: at most 9,"
    ):
        made.resume([claimed])


def test_choices_that_are_finished_are_left_alone_and_the_others_go_on() -> None:
    request = generation(n=2).request
    made = Generation(request, Tokenizer(byte_level().to_str()))
    done = replace(received(is_finished=True), packed_token_ids=pack_token_ids(ids("fox")))

    made.resume([done])

    assert made.begin_attempt("decode-1") == [(1, ())]
    assert made.num_resumptions == 1
    assert made.take_outputs() == []
    assert made.num_tokens == len(ids("fox"))


def test_what_a_worker_had_ended_with_the_last_token_ends_at_once() -> None:
    tokenizer = Tokenizer(byte_level().to_str())
    for had, finish in (([*ids("the"), 1], Finish.STOP), (ids("the fox"), Finish.LENGTH)):
        made = fresh(tokenizer, len(ids("the fox")) if finish is Finish.LENGTH else 50, ())

        made.resume([replace(received(), packed_token_ids=pack_token_ids(had), text_chars=3)])

        assert made.is_finished
        [output] = made.take_outputs()
        assert output.finish is finish
        assert output.text == ("" if finish is Finish.STOP else " fox")


# Through the public service, with workers that draw honestly.


def ids_of(messages: list[Any], choice: int = 0) -> list[int]:
    own = [each.token_ids for each in messages if each.choice == choice]
    return unpack_token_ids(b"".join(own))


def test_another_router_sends_the_rest_and_tells_the_worker_what_came_before() -> None:
    async def main() -> None:
        first = running_router(ScriptedWorker("decode-0"), resume_key=KEY)
        worker = ScriptedWorker("decode-0")
        async with first as one, running_router(worker, resume_key=KEY) as other:
            await other.generate()  # it would draw the same seed first
            request = asking(n=2)
            whole = await one.generate(request=request)
            assert [bool(each.resume_token) for each in whole.messages][:2] == [True, False]
            for cut in (1, 3, len(whole.messages) - 1):
                had = whole.messages[:cut]
                rest = await other.generate(request=resuming(request, had))

                assert rest.error is None
                for choice in range(2):
                    assert ids_of(had + rest.messages, choice) == tokens(choice, 10)
                submit = worker.submits[-1]
                assert submit.sampling.seed == one.workers["decode-0"].submits[0].sampling.seed
                assert submit.attempt == 0
                usage = rest.messages[-1].usage
                assert usage.completion_tokens == 20
                assert usage.stats.resumptions == 1
                assert rest.messages[0].request_id != had[0].request_id
                assert rest.messages[0].resume_token
            assert other.router.dispatcher.num_resumed == 3

    run_virtual(main())


def test_a_resumed_call_is_not_refused_for_a_crowd_and_ends_at_once_if_nothing_is_left() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, resume_key=KEY) as tested:
            request = asking()
            whole = await tested.generate(request=request)
            refuse = pytest.fail  # whoever asks

            tested.router.dispatcher.check_room = refuse  # type: ignore[method-assign]
            tested.router.dispatcher._check_wait = refuse  # type: ignore[method-assign]
            rest = await tested.generate(request=resuming(request, whole.messages[:2]))
            assert rest.error is None

            num_submits = len(worker.submits)
            again = resuming(request, whole.messages)
            again.resume.choices[0].finished = False  # the last message was lost half way
            [message] = (await tested.generate(request=again)).messages
            assert (message.finish_reason, message.token_ids) == (LENGTH, b"")
            assert message.usage.completion_tokens == 10
            assert 0 <= message.usage.ttft_ms <= message.usage.total_ms < 1000
            assert len(worker.submits) == num_submits

    run_virtual(main())


def flipped(token: bytes, index: int) -> bytes:
    return token[:index] + bytes([token[index] ^ 1]) + token[index + 1 :]


ALTERED: dict[str, Any] = {
    "seed": {"seed": 7},
    "temperature": {"temperature": 0.5},
    "fewer tokens": {"max_tokens": 9},
    "more tokens": {"max_tokens": 11},
    "stop tokens": {"stop_token_ids": [3]},
    "choices": {"n": 2},
}


def test_tokens_that_were_forged_altered_or_are_of_another_request_name_the_field() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), resume_key=KEY) as tested:
            request = asking()
            had = (await tested.generate(request=request)).messages[:2]
            token = had[0].resume_token
            tried = [flipped(token, index) for index in range(len(token))]
            tried += [b"", token[:-1], token + b"x", bytes(len(token))]
            for each in tried:
                await assert_refused(tested, resuming(request, had, each), "resume.token")
            for sampling in ALTERED.values():
                altered = asking(**sampling)
                await assert_refused(tested, resuming(altered, had), "resume.token")
            altered = asking()
            altered.token_ids = pack_token_ids([5, 6, 8])
            await assert_refused(tested, resuming(altered, had), "resume.token")
            assert len(tested.workers["decode-0"].submits) == 1

            assert (await tested.generate(request=resuming(request, had))).error is None

    run_virtual(main())


def test_a_token_of_another_cluster_is_refused() -> None:
    async def main() -> None:
        own = running_router(ScriptedWorker("decode-0"), resume_key=KEY)
        foreign = running_router(ScriptedWorker("decode-0"), resume_key=b"l" * KEY_BYTES)
        async with own as one, foreign as other:
            had = (await one.generate(request=asking())).messages[:2]
            await assert_refused(other, resuming(asking(), had), "resume.token")

    run_virtual(main())


def test_an_expired_token_says_so() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), resume_key=KEY) as tested:
            now = 1e9
            resume_tokens = tested.router.admission._resume_tokens
            resume_tokens._wall_clock = lambda: now
            had = (await tested.generate(request=asking())).messages[:2]

            now += RouterConfig().request_timeout_s
            assert (await tested.generate(request=resuming(asking(), had))).error is None
            now += 5
            told = await assert_refused(tested, resuming(asking(), had), "resume.token")
            assert "expired 5 s ago" in told

    run_virtual(main())


def test_what_no_client_can_have_received_names_the_field() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0"), resume_key=KEY) as tested:
            request = asking()
            messages = (await tested.generate(request=request)).messages
            had = messages[:2]

            def changed(**values: Any) -> GenerateRequest:
                again = resuming(request, had)
                for name, value in values.items():
                    setattr(again.resume.choices[0], name, value)
                return again

            twice = resuming(request, had)
            twice.resume.choices.append(twice.resume.choices[0])
            field = "resume.choices[0]"
            for again, name in (
                (changed(choice=1), f"{field}.choice"),
                (changed(token_ids=b"abc"), f"{field}.token_ids"),
                (changed(token_ids=pack_token_ids([4000])), f"{field}.token_ids[0]"),
                (changed(token_ids=pack_token_ids(tokens(0, 11))), f"{field}.token_ids"),
                (changed(text_chars=1), f"{field}.text_chars"),  # no text: it has no tokenizer
                (twice, "resume.choices[1].choice"),
                (resuming(request, messages), "resume.choices"),
            ):
                await assert_refused(tested, again, name)

    run_virtual(main())


def test_a_router_without_a_key_gives_no_tokens_and_takes_none() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested:
            had = (await tested.generate(request=asking())).messages[:2]
            assert not had[0].resume_token
            await assert_refused(tested, resuming(asking(), had, b"x" * 69), "resume")

    run_virtual(main())
