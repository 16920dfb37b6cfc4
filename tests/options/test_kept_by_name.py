"""Settings that Ray keeps are read by name, since newer code may read them."""

import copyreg
import pickle
import typing
from dataclasses import dataclass, field, fields, is_dataclass

import pytest

from cluster.controller import ClusterFacts
from cluster.deployment import Deployment
from credentials.config import TlsSettings
from credentials.secret import PartyKeys
from decode_worker.config import DecodeConfig
from http_gateway.config import GatewayConfig
from options import kept_by_name as module
from options.kept_by_name import kept_by_name
from prefill_worker.config import PrefillConfig
from router.process import RouterSettings
from worker.process import WorkerSettings

# What actors are started with, besides `pagewire.Tls`, and what a command gets of a controller.
KEPT = (
    *(Deployment, WorkerSettings, PrefillConfig, DecodeConfig, PartyKeys),
    *(RouterSettings, GatewayConfig, TlsSettings, ClusterFacts),
)


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class Now:
    """A class with a field in the middle that its pickles lack."""

    first: int
    added: int = 5
    made: list[int] = field(default_factory=list)
    last: int


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
    with pytest.raises(TypeError, match="Now: found no last, as other code made it; allowed: "):
        restored({"first": 1})


def reached(wanted):
    """Yield the dataclasses in a type, and those of their fields."""
    if is_dataclass(wanted):
        yield wanted
        hints = typing.get_type_hints(wanted)
        for each in fields(wanted):
            yield from reached(hints[each.name])
    for each in typing.get_args(wanted):
        yield from reached(each)


@pytest.mark.parametrize("kept", KEPT, ids=lambda each: each.__name__)
def test_all_settings_are_kept_by_name(kept):
    by_position = {
        each.__name__ for each in reached(kept) if each.__setstate__ is not module._restore
    }

    assert by_position == set()
