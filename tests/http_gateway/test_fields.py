"""What a request's fields say of a name that none of them has."""

import pytest

from http_gateway.errors import HttpError
from http_gateway.fields import Fields, Unsupported


def refusal(*names: str, path: str = "") -> HttpError:
    fields = Fields(dict.fromkeys(names, 1), path)
    fields.refuse_unsupported({"logit_bias": Unsupported("there is none")})
    fields.take("temperature")
    fields.text("model")
    fields.integer("n", 1, 64)
    with pytest.raises(HttpError) as refused:
        fields.refuse_others()
    return refused.value


@pytest.mark.parametrize(
    ("name", "path", "meant"),
    [
        ("temprature", "", " (did you mean 'temperature'?)"),
        ("Model", "", " (did you mean 'model'?)"),
        ("modell", "tools[0].", " (did you mean 'tools[0].model'?)"),
        ("zebra", "", ""),
        ("logit_bia", "", ""),
    ],
)
def test_a_slip_is_answered_with_the_name_that_was_meant(name: str, path: str, meant: str) -> None:
    error = refusal(name, path=path.removesuffix("."))

    allowed = "model, n, temperature"
    assert error.message == f"{path}{name}: found an unknown parameter{meant}; allowed: {allowed}"
    assert error.code == "unknown_parameter"


def test_a_name_of_any_length_is_refused_briefly() -> None:
    assert len(refusal("temperature" * 100_000).message) < 200


def test_several_unknown_names_get_a_line_each_up_to_a_limit() -> None:
    error = refusal("temprature", "modell", *(f"zebra{number}" for number in range(1000)))

    lines = error.message.split("\n")
    assert len(lines) == 8
    assert lines[0].startswith("temprature: found an unknown parameter (did you mean 'temperature'")
    assert lines[1].startswith("modell: found an unknown parameter (did you mean 'model'")
    assert (error.param, error.code) == ("temprature", "unknown_parameter")
