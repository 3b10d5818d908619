"""Settings of the property tests, and the pool of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from ringfa3.build import toolchain
from tests.support import fake_tools
from tests.support.ranks import Ranks

# The same examples in every run; HYPOTHESIS_PROFILE=explore tries many fresh ones.
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=200, suppress_health_check=slow
)
settings.register_profile(
    "explore", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=slow
)
# PyTorch's store asks a name server who connects; a lost answer may cost a test 1 s, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
torch.set_num_threads(1)  # small tensors; and the ranks of the pool need the cores
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
# A suite that was started in the background ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of the CPU path are that on any machine; `-m gpu` selects the others."""
    if config.getoption("-m") == "not gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes that talk over gloo, shared by all tests."""
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in nvcc and CUTLASS, an empty cache; gives their folder."""
    for name in ("MAX_JOBS", "LOCAL_RANK", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUTLASS_PATH", str(fake_tools.cutlass(tmp_path)))
    monkeypatch.setenv("RINGFA3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(fake_tools.host(tmp_path / "host")))
    monkeypatch.setattr(toolchain, "wheel_folders", lambda: [tmp_path / "wheels"])
    fake_tools.nvcc(tmp_path)
    return tmp_path
