"""Settings that Ray keeps are read by name, since newer code may read them."""

import copyreg
import inspect
import pickle
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path

import pytest

from cluster.controller import ClusterFacts, ControllerActor
from decode_worker.actor import DecodeActor
from http_gateway.actor import GatewayActor
from llm_engine.model_identity import ModelIdentity
from options import kept_by_name as module
from options.kept_by_name import kept_by_name
from prefill_worker.actor import PrefillActor
from router.actor import RouterActor

ROOT = Path(__file__).parents[2]
ACTORS = (ControllerActor, RouterActor, GatewayActor, PrefillActor, DecodeActor)


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class Now:
    """A class with a field in the middle that its pickles lack."""

    first: int
    added: int = 5
    made: list[int] = field(default_factory=list)
    last: int


@dataclass(frozen=True, slots=True)
class ByPosition:
    """A class that is pickled as a list of values."""

    value: int = 0


class Pair(typing.NamedTuple):
    """Likewise."""

    first: int
    last: int


@dataclass
class Bare:
    """A class whose older pickles lack a new field, for which there is no value."""

    value: int


@kept_by_name
@dataclass(frozen=True, slots=True)
class Holder:
    """A class that is kept by name, and holds others that are not."""

    some: tuple[ByPosition, ...]
    others: Mapping[str, Pair | None]
    bare: Bare


def restored(values):
    """Return what pickle makes of an instance of other code."""
    found = copyreg.__newobj__(Now)
    found.__setstate__(values)
    return found


def test_each_field_gets_its_own_value_whatever_was_added_or_removed():
    assert restored({"first": 1, "removed": 2, "last": 3}) == Now(first=1, last=3)
    assert pickle.loads(pickle.dumps(Now(first=1, added=2, last=3))) == Now(
        first=1, added=2, last=3
    )
    with pytest.raises(TypeError, match="Now: found no last, because other code made it; allow"):
        restored({"first": 1})


def reached(hint):
    """Yield the project's classes in a type, and in those of a dataclass's fields."""
    made = typing.get_origin(hint) or hint
    if isinstance(made, type) and (ROOT / made.__module__.partition(".")[0]).is_dir():
        yield made
    within = list(typing.get_args(hint))
    if is_dataclass(made):
        hints = typing.get_type_hints(made)
        within += [hints[each.name] for each in fields(made)]
    for each in within:
        yield from reached(each)


def is_by_name(made):
    """Return whether each field gets its own value of a pickle that other code made."""
    if is_dataclass(made) and getattr(made, "__setstate__", None) is module._restore:
        return True
    # Without slots a pickle has the attributes by name; those that it lacks are the class's.
    own = fields(made) if is_dataclass(made) else ()
    return not hasattr(made, "__slots__") and all(each.default is not MISSING for each in own)


def by_position(*hints):
    return {each for hint in hints for each in reached(hint) if not is_by_name(each)}


def test_these_are_all_actors():
    files = [*ROOT.glob("*/actor.py"), *ROOT.glob("cluster/*.py")]
    found = {
        name
        for file in files
        for name in re.findall(r"^class (\w+Actor)\b(?!\(ABC)", file.read_text(), re.MULTILINE)
    }

    assert found == {each.__name__ for each in ACTORS}


@pytest.mark.parametrize("actor", ACTORS, ids=lambda each: each.__name__)
def test_an_actor_takes_one_argument_in_which_all_is_kept_by_name(actor):
    _self, argument = inspect.signature(actor.__init__).parameters
    bases = getattr(actor, "__orig_bases__", ())  # a worker's tells which config it takes
    within = [each for base in bases for each in typing.get_args(base)]

    assert by_position(typing.get_type_hints(actor.__init__)[argument], *within) == set()


def test_what_a_controller_takes_and_returns_is_kept_by_name():
    methods = [each for each in vars(ControllerActor).values() if inspect.isfunction(each)]
    hints = [
        hint
        for each in methods
        if not each.__name__.startswith("_")
        for hint in typing.get_type_hints(each).values()
    ]

    assert {ClusterFacts, ModelIdentity} <= {each for hint in hints for each in reached(hint)}
    assert by_position(*hints) == set()


def test_what_is_kept_by_position_is_found_wherever_it_is():
    assert by_position(Now | None, tuple[Holder, ...]) == {ByPosition, Pair, Bare}
