import ctypes
import sys
import threading
from types import SimpleNamespace

import pytest

from llm_engine import gpu_context as module
from llm_engine.gpu_context import making_context


class FakeCuda:
    """The driver and CUDA's runtime; `calls` are the names of the functions that were called."""

    def __init__(self, failing=""):
        self.calls = []
        self.failing = failing
        self.has_context = threading.Event()
        self.has_kernels = threading.Event()

    def load(self, name):
        if self.failing == "load":
            raise OSError(f"{name}: cannot open shared object file")
        driver = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
        names = driver if name == "libcuda.so.1" else ("cudaFree",)
        return SimpleNamespace(**{each: self._function(each) for each in names})

    def _function(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuDevicePrimaryCtxRetain":
                self.has_context.set()
            if name == "cudaFree":
                assert arguments == (None,)
                self.has_kernels.set()
            return int(name == self.failing)

        return call


@pytest.fixture
def use(monkeypatch):
    """Have a module in the role of torch, not imported yet, and use a fake; returns the fake."""
    monkeypatch.setattr(module, "TORCH", "tests.no_torch")

    def use(cuda):
        monkeypatch.setattr(ctypes, "CDLL", cuda.load)
        return cuda

    return use


def test_a_context_is_made_before_torch_is_imported_and_gets_its_kernels_then(use, monkeypatch):
    cuda = use(FakeCuda())
    with making_context():
        assert cuda.has_context.wait(10)
        assert not cuda.has_kernels.wait(0.03)
        monkeypatch.setitem(sys.modules, module.TORCH, module)
        assert cuda.has_kernels.wait(10)

    assert cuda.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cudaFree"]


def test_an_import_that_fails_ends_it(use):
    cuda = use(FakeCuda())
    with pytest.raises(ModuleNotFoundError, match="no torch"), making_context():
        raise ModuleNotFoundError("no torch")

    assert "cudaFree" not in cuda.calls


@pytest.mark.parametrize(
    ("failing", "calls"),
    [
        ("load", []),
        ("cuInit", ["cuInit"]),
        ("cuDeviceGet", ["cuInit", "cuDeviceGet"]),
        ("cuDevicePrimaryCtxRetain", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
    ],
)
def test_what_fails_is_left_to_torch(use, monkeypatch, failing, calls):
    cuda = use(FakeCuda(failing))
    monkeypatch.setitem(sys.modules, module.TORCH, module)
    with making_context():
        pass

    assert cuda.calls == calls
