"""Settings of the property tests, and the fixtures that several folders share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from ringfa3 import host
from ringfa3.build import toolchain
from ringfa3.build.host_library import ensure_host_library
from tests.support import fake_tools
from tests.support.double import double
from tests.support.fake_kernels import FakeKernels, compile_kernels
from tests.support.ranks import Ranks

# Every run has the same examples; HYPOTHESIS_PROFILE=explore tries many new ones.
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=200, suppress_health_check=slow
)
settings.register_profile(
    "explore", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=slow
)
# PyTorch's store looks up the names of its clients. A lost answer costs 1 s instead of 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
torch.set_num_threads(1)  # tensors are small, and the ranks of the pool need the cores
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. Their child
# processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Hides the GPUs from tests of the CPU path, also on a machine that has some."""
    if "not gpu" in config.getoption("-m"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that runs a task of the trainer in this process sets its number of threads.

    Later tests have one again: operations on tensors so small take ten times as long with two.
    """
    yield
    torch.set_num_threads(1)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Casts to float32, of models for example, are casts to float64."""
    with double():
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of four gloo ranks, shared by all tests of a worker."""
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake nvcc and CUTLASS and an empty build cache, which the build uses."""
    for name in ("MAX_JOBS", "LOCAL_RANK", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUTLASS_PATH", str(fake_tools.cutlass(tmp_path)))
    monkeypatch.setenv("RINGFA3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(fake_tools.host(tmp_path / "host")))
    monkeypatch.setattr(toolchain, "wheel_folders", lambda: [tmp_path / "wheels"])
    fake_tools.nvcc(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def host_library() -> Any:
    """The host library as a module, built once and kept in the cache of the kernels."""
    return host.load(ensure_host_library())


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> FakeKernels:
    return FakeKernels(compile_kernels(tmp_path_factory.mktemp("kernels")))


@pytest.fixture
def fake_kernels(fake_library: FakeKernels) -> Iterator[FakeKernels]:
    """Attention of CPU tensors launches kernels that keep their arguments."""
    with fake_library.stands_in():
        yield fake_library
    fake_library.reset()


@pytest.fixture
def kernels(fake_kernels: FakeKernels, host_library: Any) -> Iterator[FakeKernels]:
    """The host library starts these calls; it has no program yet."""
    host.start(host_library, "cpu", fake_kernels.driver())
    host.select("cpp")
    yield fake_kernels
    host.stop()
