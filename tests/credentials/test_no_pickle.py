"""Nothing that comes over the network is unpickled or run: Ray's own channel is the only one."""

import ast
import asyncio
import sys

import pytest

from tests.decode_worker.harness import prompt_of
from tests.decode_worker.test_real_grpc import real_session
from tests.support.distributions import SOURCES

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# Of these modules or on their own; torch.load unpickles, yaml.load makes any object.
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load"}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(f)",
        "eval('1')",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_what_runs_data_is_seen(source: str) -> None:
    assert offences(source)


def test_no_module_runs_data() -> None:
    found = {str(path): offences(path.read_text(encoding="utf-8")) for path in SOURCES}

    assert len(found) > 100
    assert {name: each for name, each in found.items() if each} == {}


def test_a_request_over_real_grpc_and_tcp_unpickles_nothing() -> None:
    unpickled: list[object] = []
    is_listening = False

    def hook(event: str, arguments: tuple[object, ...]) -> None:  # it stays for good
        if is_listening and event == "pickle.find_class":
            unpickled.append(arguments)

    async def main() -> None:
        nonlocal is_listening
        sys.addaudithook(hook)
        async with real_session() as (_, router, _channel):
            is_listening = True
            stream = await router.submit(prompt_of(50))
            await router.finish(stream, timeout_s=20.0)
            is_listening = False
            assert stream.stats.pages_moved > 0

    asyncio.run(main())

    assert unpickled == []
