from hypothesis import given, settings, strategies
from hypothesis.internal.conjecture.providers import _get_local_constants


@settings(max_examples=1)
@given(strategies.none())
def test_hypothesis_draws_no_constants_of_this_project(nothing: None) -> None:
    assert len(_get_local_constants()) == 0
