"""If this fails, deterministic runs differ, or a setting forbids them without an error.
``train.deterministic``: the settings that it changes or keeps, and the attention modules."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from ringfa3 import RingFA3Attention
from train.config import Config
from train.model.transformer import build_model
from train.run.deterministic import ENVIRONMENT, make_deterministic


@pytest.fixture(autouse=True)
def _restored(monkeypatch) -> Iterator[None]:
    """The flags of PyTorch are global: each test ends with those that it began with."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    fill, cudnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    cudnn.deterministic = False


def test_a_gpu_run_sets_and_prints_all_settings():
    line = make_deterministic(torch.device("cuda", 0))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # an error, not a warning
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    for setting in ("CUBLAS_WORKSPACE_CONFIG=:4096:8", "NCCL_ALGO=Ring", "NCCL_PROTO=Simple"):
        name, value = setting.split("=")
        assert os.environ[name] == value
        assert setting in line
    assert "\n" not in line
    assert "from the environment" not in line


def test_variables_of_the_user_keep_their_values(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    line = make_deterministic(torch.device("cuda", 0))
    assert os.environ["NCCL_ALGO"] == "Tree"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["NCCL_PROTO"] == "Simple"
    assert "NCCL_ALGO=Tree (from the environment), NCCL_PROTO=Simple" in line
    assert "CUBLAS_WORKSPACE_CONFIG=:16:8 (from the environment)" in line


def test_on_the_cpu_no_variable_is_set():
    assert "NCCL" not in make_deterministic(torch.device("cpu"))
    assert not ENVIRONMENT.keys() & os.environ.keys()
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_attention_module_is_deterministic(config: Config, deterministic):
    config.model.n_layers, config.train.deterministic = 2, deterministic
    model = build_model(config, 300, torch.device("cpu"))
    found = [m.deterministic for m in model.modules() if isinstance(m, RingFA3Attention)]
    assert found == [deterministic] * 2
