import pytest

from observability.last_line import last_line


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            "Traceback:\n  x\noptions.ports.NoPortFree: port_range: found 'x'\n",
            "port_range: found 'x'",
        ),
        ("ValueError: no", "ValueError: no"),
        ("", "Exception"),
    ],
)
def test_the_reason_of_an_error_comes_without_the_path_of_its_class(told, reason):
    assert last_line(Exception(told)) == reason
