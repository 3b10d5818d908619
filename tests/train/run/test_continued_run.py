"""If this fails, a run continues under settings that it may not change. What may change before a
start that continues a run."""

from __future__ import annotations

import pytest

from tests.train.held_runs import hold_run
from train.config import Config
from train.run.run_config import allowed_changes, continues
from train.run.run_folder import RunFolder

KEYS = ["train.residual", "engine", "memory.offload", "data.seq_len", "parallel.cp"]


@pytest.fixture
def folder(config) -> RunFolder:
    return hold_run(config)


def test_a_run_that_continues_keeps_what_determines_its_result(config, folder):
    for overwrite in (False, True):  # which continues a stopped run of the same settings
        config.run.overwrite = overwrite
        assert continues(config)
        assert allowed_changes(config, KEYS) == ["engine", "memory.offload", "parallel.cp"]


def _in_another_folder(config: Config, folder: RunFolder) -> None:
    config.run.dir += "-new"


def _replaces_it(config: Config, folder: RunFolder) -> None:
    config.run.overwrite, config.train.seed = True, config.train.seed + 1


def _is_another_run(config: Config, folder: RunFolder) -> None:
    config.train.seed += 1


def _never_resumes(config: Config, folder: RunFolder) -> None:
    config.checkpoint.resume = "never"


def _cannot_be_read(config: Config, folder: RunFolder) -> None:
    folder.config.write_text("{")


def _holds_no_run(config: Config, folder: RunFolder) -> None:
    folder.metrics.unlink()


@pytest.mark.parametrize(
    "change",
    [
        *(_in_another_folder, _replaces_it, _is_another_run),
        *(_never_resumes, _cannot_be_read, _holds_no_run),
    ],
)
def test_any_other_start_may_have_all_settings(config, folder, change):
    change(config, folder)
    assert not continues(config)
    assert allowed_changes(config, KEYS) == KEYS
