"""What a header proves, and what it cannot be used for."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credentials.cluster import ClusterCredentials
from credentials.errors import NotProven, WrongIncarnation
from credentials.party import Party
from credentials.secret import CALLEES, ClusterSecret
from tests.support.cluster_keys import SECRET, credentials_of

METHOD = "/pagewire.v1.PrefillService/Prefill"
DECODE_0 = credentials_of("decode", "decode-0", 7)
PREFILL_0 = credentials_of("prefill", "prefill-0", 5)
HEADER, ANSWER = DECODE_0.callee(PREFILL_0.party).prove(METHOD)


def test_a_genuine_header_tells_who_calls_and_gets_the_answer_that_the_caller_expects() -> None:
    call = PREFILL_0.check(METHOD, HEADER)

    assert call.caller == Party(role="decode", name="decode-0", incarnation=7)
    assert call.answer == ANSWER


def test_each_call_has_a_number_and_a_proof_of_its_own() -> None:
    callee = DECODE_0.callee(PREFILL_0.party)

    headers = [callee.prove(METHOD)[0] for _ in range(3)]

    numbers = [PREFILL_0.check(METHOD, header).number for header in headers]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]


@pytest.mark.parametrize(
    ("checked_by", "method"),
    [
        (PREFILL_0, "/pagewire.v1.PrefillService/Connect"),
        (credentials_of("prefill", "prefill-1", 5), METHOD),
        (credentials_of("decode", "prefill-0", 5), METHOD),
        (ClusterCredentials(ClusterSecret.generate().keys_of("prefill", "prefill-0"), 5), METHOD),
    ],
    ids=["another method", "another name", "another role", "another cluster"],
)
def test_a_header_is_good_for_nothing_but_its_own_call(
    checked_by: ClusterCredentials, method: str
) -> None:
    with pytest.raises(NotProven):
        checked_by.check(method, HEADER)


def test_a_header_for_another_start_is_refused_by_name() -> None:
    with pytest.raises(WrongIncarnation, match="the call is for incarnation 5, this is 6"):
        credentials_of("prefill", "prefill-0", 6).check(METHOD, HEADER)


def test_what_is_kept_for_callers_that_left_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("credentials.cluster.MAX_CALLERS", 3)
    called = credentials_of("prefill", "prefill-0", 5)

    for number in [*range(200), 0]:
        caller = credentials_of("router", f"router-{number}", 1)
        header, _ = caller.callee(called.party).prove(METHOD)
        assert called.check(METHOD, header).caller == caller.party

    assert len(called._callers) == 3


@given(st.data())
def test_a_header_changed_anywhere_is_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(("flip", "cut", "extend", "insert")))
    index = data.draw(st.integers(0, len(HEADER) - 1))
    changed = {
        "flip": HEADER[:index]
        + bytes([HEADER[index] ^ data.draw(st.integers(1, 255))])
        + HEADER[index + 1 :],
        "cut": HEADER[:index],
        "extend": HEADER + data.draw(st.binary(min_size=1, max_size=100)),
        "insert": HEADER[:index] + data.draw(st.binary(min_size=1, max_size=9)) + HEADER[index:],
    }[kind]
    if changed == HEADER:  # what was inserted repeats what stood there
        return

    with pytest.raises(NotProven):
        PREFILL_0.check(METHOD, changed)


@pytest.mark.parametrize("header", [None, b"", b"x", bytes(90), bytes(1000), b"\x01\x02" * 40])
def test_what_is_no_header_is_refused(header: bytes | None) -> None:
    with pytest.raises(NotProven):
        PREFILL_0.check(METHOD, header)


def test_nobody_can_pass_for_another_with_the_keys_that_it_has() -> None:
    decode_1 = SECRET.keys_of("decode", "decode-1")
    router = SECRET.keys_of("router", "router-0")

    posing = [
        replace(decode_1, name="decode-0"),  # its own key, another's name
        replace(router, role="decode", name="decode-0"),
        replace(decode_1, calling={"prefill": decode_1.accepting}),
    ]

    for keys in posing:
        header, _ = ClusterCredentials(keys, 7).callee(PREFILL_0.party).prove(METHOD)
        with pytest.raises(NotProven):
            PREFILL_0.check(METHOD, header)


def test_a_router_cannot_answer_for_a_prefill_worker() -> None:
    router = SECRET.keys_of("router", "router-0")
    as_prefill = ClusterCredentials(replace(router, role="prefill", name="prefill-0"), 5)

    with pytest.raises(NotProven):
        as_prefill.check(METHOD, HEADER)


def test_each_process_has_only_the_keys_of_its_part() -> None:
    for role, callees in CALLEES.items():
        keys = SECRET.keys_of(role, "x")
        assert set(keys.calling) == set(callees)

    with pytest.raises(KeyError):
        PREFILL_0.callee(DECODE_0.party)


def test_keys_are_not_in_what_is_printed_and_survive_the_way_to_an_actor() -> None:
    keys = SECRET.keys_of("decode", "decode-0")

    assert repr(keys) == "PartyKeys(role='decode', name='decode-0')"
    assert pickle.loads(pickle.dumps(keys)) == keys
    assert "x" * 8 not in repr(ClusterSecret(b"x" * 32))


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="a secret of 31 bytes; at least 32"):
        ClusterSecret(bytes(31))


def test_both_sides_of_a_connection_derive_its_key_and_nobody_else() -> None:
    sides = {"sender": PREFILL_0.party, "receiver": DECODE_0.party}

    key = DECODE_0.transfer_key("c", **sides)

    assert PREFILL_0.transfer_key("c", **sides) == key
    decode_1 = credentials_of("decode", "decode-1", 7)
    others = [
        PREFILL_0.transfer_key("d", **sides),
        PREFILL_0.transfer_key("c", **sides | {"receiver": decode_1.party}),
        decode_1.transfer_key("c", **sides | {"receiver": decode_1.party}),
        PREFILL_0.transfer_key("c", **sides | {"receiver": replace(DECODE_0.party, incarnation=8)}),
        DECODE_0.transfer_key("c", **sides | {"sender": replace(PREFILL_0.party, incarnation=8)}),
    ]
    assert key not in others
