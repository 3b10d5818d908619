"""Settings of the property tests, and the pool of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from ranks import Ranks

# The same examples in every run; HYPOTHESIS_PROFILE=explore tries many fresh ones.
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=200, suppress_health_check=slow
)
settings.register_profile(
    "explore", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=slow
)
torch.set_num_threads(1)  # small tensors; and the ranks of the pool need the cores
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


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
