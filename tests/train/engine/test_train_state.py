"""Which checkpoints belong to the stream of samples of a run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from train.config import ConfigError
from train.data.manifest import write_manifest
from train.engine.train_state import TrainState


def test_the_same_tokens_under_another_value_of_eos_token_go_on(config, tmp_path):
    """A file of tokens needs the name that null stood for while the run trained them."""

    def state(digest: str, eos: str | None) -> TrainState:
        data = dataclasses.replace(config.data, eos_token=eos)
        corpus, engine = SimpleNamespace(digest=digest), SimpleNamespace(parallel=SimpleNamespace())
        engine.parallel.dp = 1
        return TrainState(dataclasses.replace(config, data=data), corpus, engine)

    saved = state("a", None).metadata()
    write_manifest(tmp_path, saved)
    assert state("a", "<begin>").metadata_of(tmp_path) == saved
    with pytest.raises(ConfigError, match=r"data\.eos_token was null, is now <begin>"):
        state("b", "<begin>").metadata_of(tmp_path)
