"""Nothing that comes over the network is unpickled or run: Ray's own channel is the only one."""

import ast
import json
import pickle
import sys
from pathlib import Path

import pytest

from pagewire import Client
from tests.http_gateway.parrot import MARKS, write_folder
from tests.http_gateway.raw_http import exchange, request
from tests.http_gateway.serving import gateway
from tests.http_gateway.whole_cluster import whole_cluster
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


def test_a_request_over_http_grpc_and_tcp_unpickles_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    unpickled: list[object] = []
    is_listening = False

    def hook(event: str, arguments: tuple[object, ...]) -> None:  # it stays for good
        if is_listening and event == "pickle.find_class":
            unpickled.append(arguments)

    folder = write_folder(tmp_path_factory.mktemp("model"), MARKS["plain"])
    text = "The page was sent to another worker"
    body = json.dumps({"prompt": text, "max_tokens": 5})
    sys.addaudithook(hook)
    with gateway(lambda: whole_cluster(folder)) as served, Client(served.router_address) as client:
        is_listening = True
        over_grpc = client.generate(text, max_tokens=5)
        over_http = exchange(served.host_and_port, request("/v1/completions", body))
        from_network = list(unpickled)
        pickle.loads(pickle.dumps(Path("seen")))
        is_listening = False

    assert over_grpc.usage.pages_moved > 0
    assert over_http.status == 200
    assert from_network == []
    assert unpickled, "the hook sees what is unpickled"
