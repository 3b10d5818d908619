"""If this fails, a job that does not fit starts, and runs out of memory. The prediction before a
run on GPUs, on a machine without one."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from train import compile_choice
from train.config import Config, ConfigError
from train.data.shards import open_corpus
from train.tasks import estimate, train
from train.tasks.estimate import before_run

CUDA = torch.device("cuda", 0)


def device_of(n_bytes: float):
    """A CUDA device with so much memory."""
    properties = SimpleNamespace(total_memory=n_bytes)
    return mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)


@pytest.fixture
def config(config: Config) -> Config:
    """A head dim that has kernels; 0.9 GB are of the CUDA context."""
    config.model.head_dim = 64
    return config


def test_a_run_that_does_not_fit_ends_before_its_process_groups(config):
    """ConfigError, which ends a process with code 2, and no rank has joined any other."""
    with (
        device_of(5e8),
        mock.patch.object(train, "choose_device", return_value=CUDA),
        mock.patch.object(train, "set_affinity"),
        mock.patch.object(train, "join", side_effect=ConfigError("joined")) as join,
        pytest.raises(ConfigError, match=r"needs 0\.9 GB of device memory.*are 0\.5.*force=true"),
    ):
        train.run(config, mock.Mock())
    join.assert_not_called()


def test_forced_or_large_enough_it_starts(config):
    """The prediction is that of the first sample, whose documents are too short for a time."""
    corpus = open_corpus(config.data)
    with device_of(4e9):
        made = before_run(config, corpus, CUDA)
    assert made.job.cu_seqlens[-1] == config.data.seq_len
    assert len(made.job.cu_seqlens) > 2
    assert made.time is None
    config.memory.force, config.data.document_mask = True, False
    with device_of(2e9):
        assert before_run(config, corpus, CUDA).job.cu_seqlens == [0, config.data.seq_len]


def test_what_cannot_be_predicted_starts_and_says_so(config, capsys):
    config.train.deterministic = True
    with device_of(1.0):
        assert before_run(config, open_corpus(config.data), CUDA) is None
    line = "No prediction of memory and time: train.deterministic=true cannot be predicted; "
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(("compiler", "compiled"), [("clang", True), (None, False)])
def test_a_run_is_predicted_with_blocks_as_this_machine_compiles_them(
    config, tmp_path, monkeypatch, compiler, compiled
):
    """train.compile=auto, on a machine with Triton and with or without a C compiler."""
    monkeypatch.setattr(compile_choice, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if compiler is not None:
        (tmp_path / compiler).touch(mode=0o755)
    with device_of(4e9):
        assert before_run(config, open_corpus(config.data), CUDA).job.compiled is compiled


def test_a_run_on_a_cpu_is_not_predicted(config):
    with (
        mock.patch.object(estimate, "require_fit", side_effect=AssertionError),
        mock.patch.object(train, "before_run", side_effect=AssertionError),
        mock.patch.object(train, "join", side_effect=ConfigError("as far as this")),
        pytest.raises(ConfigError, match="as far as this"),
    ):
        train.run(config, mock.Mock())
