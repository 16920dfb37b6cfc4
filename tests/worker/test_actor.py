"""What a worker's actor learns on its host before it loads weights; Ray is a fake."""

import asyncio
import os
import shutil
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import worker.actor as module
import worker.process
from cluster.demo_model import write_demo_model
from credentials.config import TlsSettings
from llm_engine import load_engine
from llm_engine.model_identity import read_identity
from tests.support.certificates import Authority
from tests.support.cluster_keys import SECRET
from tests.support.interfaces import have_interfaces
from worker.actor import WorkerActor, WorkerStart
from worker.errors import HostUnfit
from worker.own_host import HostOptions
from worker.settings import WorkerSettings

KEYS = SECRET.keys_of("decode", "decode-0")
IN_CLEAR = TlsSettings()
NODE = {
    "NodeID": "id",
    "NodeManagerAddress": "10.0.0.2",
    "NodeManagerHostname": "gpu-a",
    "Resources": {"pagewire-decode": 1.0},
}


class FakeController:
    """Its handle; `asked` are the calls, in order."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.is_restart = False
        self.asked: list[str] = []
        self.was_ready = self._method("was_ready", lambda: self.is_restart)
        self.model_identity = self._method("model_identity", lambda: read_identity(self.model))

    def _method(self, name: str, answer: Callable[[], Any]) -> Any:
        def remote(*_: Any) -> Awaitable[Any]:
            self.asked.append(name)

            async def answering() -> Any:
                return answer()

            return answering()

        return SimpleNamespace(remote=remote)


class Actor(WorkerActor[None]):
    """Of no pool."""

    pool = "decode"

    def _make_pool(self, *_: Any) -> Any:
        raise AssertionError("nothing is loaded")


class OwnContext:
    """What Ray tells an actor of itself."""

    is_another = False

    def get_node_id(self) -> str:
        return "id"

    @property
    def was_current_actor_reconstructed(self) -> bool:
        warnings.warn("Use get_actor_id() instead", DeprecationWarning, stacklevel=1)
        return self.is_another


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "plain").mkdir()
    write_demo_model(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def controller(model: Path, monkeypatch: pytest.MonkeyPatch) -> FakeController:
    controller = FakeController(model)
    monkeypatch.setattr(ray, "get_actor", lambda name: controller)
    monkeypatch.setattr(ray, "nodes", lambda: [{**NODE, "NodeID": "other"}, NODE])
    own = OwnContext()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: own)
    monkeypatch.setattr(module, "_import_engine", lambda device: None)  # it takes seconds
    have_interfaces(monkeypatch, {"eth0": ["10.0.0.2"], "eth1": ["10.1.0.2"]})
    return controller


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """With which address and model worker processes are made, which load the weights."""
    made = []

    class FakeProcess:
        def __init__(self, settings: WorkerSettings, *_: Any, **__: Any) -> None:
            made.append((settings.host, settings.model_dir))

        async def start(self, make_pool: Any) -> None:
            pass

        async def wait_failed(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(worker.process, "WorkerProcess", FakeProcess)
    return made


def start(model: Path, *, host: str = "", tls: TlsSettings = IN_CLEAR, **by_host: Any) -> None:
    settings = WorkerSettings(
        worker_id="decode-0",
        model_dir=model,
        served_model_name="tiny",
        device="cpu",
        dtype="auto",
        num_seats=1,
        page_size=16,
        num_pages=1,
        gpu_memory_fraction=0.5,
        workers_per_gpu=1,
        cpu_pages_bytes=1,
        cpu_threads=1,
        host=host,
        by_host=HostOptions(**by_host),
        log_level="info",
        log_format="text",
        tls=tls,
    )
    actor: Any = Actor.__new__(Actor)

    async def scenario() -> None:
        await actor.__init__(
            WorkerStart(settings=settings, config=None, keys=KEYS, controller_name="controller")
        )

    asyncio.run(scenario())


def test_a_worker_takes_the_path_and_the_address_of_its_host(
    model: Path, controller: FakeController, started: list[tuple[str, Path]], tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    paths = {"gpu-b": "/nothing", "gpu-a": str(copy)}

    start(model, model_paths=paths, network_interface="eth1")
    start(model)

    assert started == [("10.1.0.2", copy), ("10.0.0.2", model)]


def test_a_host_that_joined_later_with_another_model_loads_nothing_of_it(
    model: Path, controller: FakeController, started: list[tuple[str, Path]], tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    with (copy / "tokenizer.json").open("a") as file:
        file.write("\n")

    with pytest.raises(
        HostUnfit, match=r"^network_interface: found 'eth7', .*; gpu-a .* another tok"
    ):
        start(model, model_paths={"pagewire-decode": str(copy)}, network_interface="eth7")

    assert started == []


def test_a_host_that_joined_later_without_its_certificate_loads_nothing(
    model: Path, controller: FakeController, started: list[tuple[str, Path]], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    tls = TlsSettings(inside=authority.inside_by_host("gpu-b"))

    with pytest.raises(HostUnfit, match=r"^tls.certificate_file: on gpu-a .*gpu-a.crt cannot be r"):
        start(model, tls=tls)
    assert started == []

    authority.inside_by_host("gpu-a")
    start(model, tls=tls)
    assert started == [("10.0.0.2", model)]


def test_a_worker_does_not_wait_for_ever_for_the_routers_host(
    model: Path,
    controller: FakeController,
    started: list[tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller.model_identity = SimpleNamespace(remote=lambda: asyncio.Event().wait())
    monkeypatch.setattr(module, "IDENTITY_TIMEOUT_S", 0.0)

    with pytest.raises(HostUnfit, match="router's host does not report which model it has"):
        start(model)

    assert started == []


def test_a_model_that_has_changed_on_all_hosts_is_the_same(
    model: Path, controller: FakeController, started: list[tuple[str, Path]], tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    for folder in (model, copy):
        with (folder / "tokenizer.json").open("a") as file:
            file.write("\n")

    start(model, model_paths={"gpu-a": str(copy)})

    assert started == [("10.0.0.2", copy)]


def test_a_worker_that_begins_anew_waits_for_nobody(
    model: Path, controller: FakeController, started: list[tuple[str, Path]]
) -> None:
    controller.is_restart = True

    start(model, model_paths={"gpu-a": "/data/tiny"})

    assert started == [("10.0.0.2", Path("/data/tiny"))]
    assert controller.asked == ["was_ready"]


def test_a_worker_whose_interface_has_gone_is_started_again_by_ray(
    model: Path,
    controller: FakeController,
    started: list[tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    controller.is_restart = True
    monkeypatch.setattr(os, "_exit", end)

    with pytest.raises(SystemExit, match="1"):
        start(model, network_interface="eth7")

    assert started == []


@pytest.mark.parametrize(
    ("is_another", "end"), [(False, ValueError), (True, SystemExit)], ids=["first", "another"]
)
def test_a_worker_without_a_controller_is_started_again_by_ray_unless_it_is_new(
    model: Path,
    controller: FakeController,
    started: list[tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    is_another: bool,
    end: type[BaseException],
) -> None:
    """Ray gives up an actor whose constructor raises, and restarts one whose process ends."""

    def find(name: str) -> None:
        raise ValueError(f"Failed to look up actor with name {name!r}")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(ray, "get_actor", find)
    monkeypatch.setattr(ray.get_runtime_context(), "is_another", is_another)
    monkeypatch.setattr(os, "_exit", leave)

    with pytest.raises(end):
        start(model)

    assert started == []


@pytest.mark.filterwarnings("error")  # users would see Ray's own
def test_on_a_ray_of_our_own_nothing_differs_by_host(
    model: Path, controller: FakeController, started: list[tuple[str, Path]]
) -> None:
    start(model, host="127.0.0.1")

    assert started == [("127.0.0.1", model)]
    assert controller.asked == ["was_ready"]


@pytest.mark.parametrize("is_another", [False, True], ids=["first", "another"])
def test_only_a_first_start_waits_for_a_controller_that_starts_beside_it(
    model: Path,
    controller: FakeController,
    started: list[tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    is_another: bool,
) -> None:
    async def answer() -> bool:
        await asyncio.sleep(0.1)
        return False

    controller.was_ready = SimpleNamespace(remote=lambda *_: answer())
    monkeypatch.setattr(ray.get_runtime_context(), "is_another", is_another)
    monkeypatch.setattr(module, "ANNOUNCE_TIMEOUT_S", 0.0)

    start(model)

    assert started == [("10.0.0.2", model)]
    assert controller.asked == ([] if is_another else ["model_identity"])


def test_the_engine_is_imported_while_the_controller_starts(
    model: Path,
    controller: FakeController,
    started: list[tuple[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = threading.Event()

    async def answer() -> bool:
        assert await asyncio.to_thread(begun.wait, 30.0)
        return False

    monkeypatch.setattr(module, "_import_engine", lambda device: begun.set())
    controller.was_ready = SimpleNamespace(remote=lambda *_: answer())

    start(model)

    assert started == [("10.0.0.2", model)]


def test_the_context_of_a_gpu_is_made_while_the_engine_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = []

    @contextmanager
    def making_context() -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    monkeypatch.setattr(module, "making_context", making_context)
    monkeypatch.setattr(load_engine, "import_kernels", lambda: done.append("kernels"))

    module._import_engine("cpu")
    assert done == []

    module._import_engine("cuda")
    assert done == ["begin", "kernels", "end"]
