"""A grammar is compiled once for all who ask for it, and the memory of all is bounded."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from grammars import matcher, store
from grammars.constraint import Constraint
from grammars.errors import InvalidConstraint, NoVocabulary
from grammars.store import Grammars
from grammars.vocabulary import ModelTokens
from tests.support.grammar_cases import choice, regex
from tests.support.token_bits import token_ids

TOKENS = ModelTokens([*(bytes([byte]) for byte in range(256)), b""], {})
END = 256


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Constraint]:
    """What was compiled."""
    seen: list[Constraint] = []
    real = matcher.Grammar.__init__

    def noted(self, constraint, vocabulary):
        seen.append(constraint)
        real(self, constraint, vocabulary)

    monkeypatch.setattr(matcher.Grammar, "__init__", noted)
    return seen


def grammars() -> Grammars:
    return Grammars(lambda: TOKENS, (END,))


def test_who_asks_at_once_for_one_grammar_shares_it(
    compiled: list[Constraint], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, begun, go_on = grammars(), threading.Event(), threading.Event()
    real = Grammars._compile

    def slow(self, constraint):
        begun.set()
        assert go_on.wait(10)
        return real(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", slow)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(kept.begin, choice("ab", "c")) for _ in range(4)]
        assert begun.wait(10)
        go_on.set()
        matchers = [each.result(10) for each in asking]

    assert compiled == [choice("ab", "c")]
    matchers[0].accept(b"a")
    assert set(token_ids(matchers[0].allowed())) == {ord("b")}
    assert set(token_ids(matchers[1].allowed())) == set(b"ac")


def test_those_asked_for_last_are_kept(
    compiled: list[Constraint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_KEPT", 3)
    kept = grammars()
    for text in "abcadab":
        kept.begin(choice(text))

    # "a" was asked for often enough; "d" came in the place of "b", and "b" then in that of "c".
    assert [each.choices[0] for each in compiled] == ["a", "b", "c", "d", "b"]


def test_a_grammar_is_kept_for_one_tenant(compiled: list[Constraint]) -> None:
    kept = grammars()
    for salt in (b"one", b"other", b"one", b"other"):
        kept.begin(choice("a"), salt)

    assert len(compiled) == 2


def test_their_bytes_are_bounded(compiled: list[Constraint], monkeypatch) -> None:
    monkeypatch.setattr(store, "MAX_KEPT_BYTES", 100)
    kept = grammars()
    for text in ("x" * 60, "y" * 60, "x" * 60, "z" * 200):
        kept.begin(choice(text))

    assert len(compiled) == 4
    assert kept._num_bytes == 0
    assert not kept._kept


def test_what_is_refused_is_not_kept(compiled: list[Constraint]) -> None:
    kept = grammars()
    for _ in range(2):
        with pytest.raises(InvalidConstraint):
            kept.begin(regex("(a"))

    assert len(compiled) == 2
    assert kept._num_bytes == 0


def test_a_tokenizer_that_cannot_be_read_is_asked_for_again() -> None:
    answers = [NoVocabulary("broken"), TOKENS]

    def read():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    kept = Grammars(read, (END,))
    with pytest.raises(NoVocabulary):
        kept.begin(choice("a"))
    assert kept.begin(choice("a")).num_tokens == 0
