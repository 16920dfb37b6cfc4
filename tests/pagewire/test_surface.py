import subprocess
import sys

import pytest

import pagewire
from pagewire import errors

EXPORTED = """
    Client Stream AsyncClient AsyncStream Tls
    SamplingDefaults SamplingOptions Constraint Message ToolCall forced_calls
    Completion Choice Delta TokenLogprob Usage Tokens
    Model ClusterStatus WorkerStatus PageCounts HotPrefix Encryption TenantStatus
    PagewireError RequestError InvalidRequestError FieldViolation NotFoundError
    AuthenticationError OverloadedError TransportError ConnectionFailedError TlsError
    UnavailableError TimeoutError CancelledError ServerError ClosedError
"""


def test_exported_names_are_a_decision():
    assert pagewire.__all__ == EXPORTED.split()
    assert all(hasattr(pagewire, name) for name in pagewire.__all__)


def test_docstring_of_errors_is_the_tree_of_errors():
    drawn = {
        word.rstrip(":")
        for line in errors.__doc__.splitlines()
        for word in line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()[:1]
        if word.endswith("Error")
    }
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.PagewireError)
    }
    assert drawn == defined


def test_importing_the_client_stays_light():
    code = (
        "import sys, pagewire;"
        "assert 'grpc' not in sys.modules;"
        "pagewire.Client, pagewire.AsyncClient;"
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_can_set_up_its_interrupts_before_slow_imports():
    code = (
        "import sys; before = set(sys.modules);"
        "import pagewire.cli.__main__;"
        "ours = {each for each in sys.modules if each.startswith('pagewire')};"
        "print(*sorted(ours), 'typing' in set(sys.modules) - before)"
    )
    told = subprocess.check_output([sys.executable, "-S", "-c", code], text=True).split()
    assert told == [
        *("pagewire", "pagewire.cli", "pagewire.cli.__main__", "pagewire.cli.early_interrupts"),
        "False",
    ]


def test_modules_and_names_are_shown_and_found_without_an_import_of_their_own():
    code = (
        "import pagewire;"
        "assert set(pagewire.__all__) <= set(dir(pagewire));"
        "assert pagewire.errors.ClosedError is pagewire.ClosedError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_exported_is_an_import_error():
    with pytest.raises(ImportError, match="cannot import name 'Cleint' from 'pagewire'"):
        from pagewire import Cleint  # noqa: F401
    with pytest.raises(AttributeError, match="module 'pagewire' has no attribute 'Cleint'"):
        pagewire.Cleint  # noqa: B018
