from dataclasses import dataclass

from worker.suspects import SuspectTurns


@dataclass(eq=False)
class Request:
    name: str
    is_suspect: bool = False


def passes(turns: SuspectTurns[Request], ready: list[Request], count: int) -> list[str]:
    """Return who takes part in each of the next passes."""
    chosen = []
    for _ in range(count):
        takes_part = turns.next_pass(ready)
        chosen.append("".join(each.name for each in ready if takes_part(each)))
    return chosen


def test_without_suspects_all_compute_together() -> None:
    turns: SuspectTurns[Request] = SuspectTurns()
    assert passes(turns, [Request("a"), Request("b")], 2) == ["ab", "ab"]
    assert passes(turns, [], 1) == [""]


def test_each_suspect_computes_alone_and_the_others_in_between() -> None:
    turns: SuspectTurns[Request] = SuspectTurns()
    ready = [Request("a"), Request("x", True), Request("b"), Request("y", True)]
    assert passes(turns, ready, 6) == ["x", "ab", "y", "ab", "x", "ab"]


def test_suspects_take_turns_where_there_is_nobody_else() -> None:
    turns: SuspectTurns[Request] = SuspectTurns()
    ready = [Request("x", True), Request("y", True)]
    assert passes(turns, ready, 4) == ["x", "y", "x", "y"]


def test_one_who_is_cleared_joins_the_others_at_once() -> None:
    turns: SuspectTurns[Request] = SuspectTurns()
    suspect = Request("x", True)
    ready = [Request("a"), suspect]
    assert passes(turns, ready, 1) == ["x"]
    suspect.is_suspect = False
    assert passes(turns, ready, 2) == ["ax", "ax"]


def test_a_new_suspect_does_not_wait_behind_those_that_had_turns() -> None:
    turns: SuspectTurns[Request] = SuspectTurns()
    ready = [Request("x", True), Request("y", True)]
    passes(turns, ready, 3)
    assert passes(turns, [*ready, Request("z", True)], 1) == ["z"]
