"""If this fails, a run continues on other data than it began with. Which checkpoints belong to the
stream of samples of a run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from train.config import ConfigError
from train.data.manifest import write_manifest
from train.engine.train_state import TrainState


@pytest.fixture
def state(config):
    """A training state of a corpus, under a value of data.eos_token."""

    def make(digest: str, eos: str | None) -> TrainState:
        data = dataclasses.replace(config.data, eos_token=eos)
        corpus, engine = SimpleNamespace(digest=digest), SimpleNamespace(parallel=SimpleNamespace())
        engine.parallel.dp = 1
        return TrainState(dataclasses.replace(config, data=data), corpus, engine)

    return make


def test_the_same_tokens_under_another_value_of_eos_token_go_on(state, tmp_path):
    """A file of tokens needs the name that null stood for while the run trained them."""
    saved = state("a", None).metadata()
    write_manifest(tmp_path, saved)
    assert state("a", "<begin>").metadata_of(tmp_path) == saved
    with pytest.raises(ConfigError, match=r"data\.eos_token was null, is now <begin>"):
        state("b", "<begin>").metadata_of(tmp_path)


def test_samples_of_version_0_1_are_refused_with_what_still_works(state, tmp_path):
    """No settings give its samples: the error must not ask for the same settings."""
    saved = state("a", "none").metadata()
    del saved["settings"]["data"]["eos_token"]
    write_manifest(tmp_path, saved)
    with pytest.raises(ConfigError, match=r"RingFA3 0\.1 .*reset_data=true") as refusal:
        state("b", "none").metadata_of(tmp_path)
    assert "give the same" not in str(refusal.value)
    assert state("a", "none").metadata_of(tmp_path) == saved
