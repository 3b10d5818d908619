"""``train.speed_test``: a run that measures steps, and neither evaluates nor saves."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.train.jobs import events
from tests.train.trainers import make_trainer, shrink
from train.checks.config import check
from train.config import Config, ConfigError
from train.engine.stored_checkpoint import checkpoints_in
from train.tasks.estimate import PARTS


@pytest.fixture
def config(config: Config) -> Config:
    shrink(config)
    config.train.speed_test, config.train.eval_every, config.checkpoint.every = True, 0, 0
    return config


def test_a_speed_test_measures_steps_after_the_first(config):
    """It saves and evaluates nothing. Errors are relative to a prediction, if there is one."""
    config.train.steps, config.parallel.kv_budget = 4, 1000
    trainer = make_trainer(config)
    memory = SimpleNamespace(device=1, host={"offloaded activations": 0})
    time = SimpleNamespace(seconds=dict.fromkeys(PARTS, 0.5), total=3.0)
    job = SimpleNamespace(ranks_per_host=1)
    trainer.prediction = SimpleNamespace(memory=memory, time=time, job=job)
    assert trainer._batches(0)[0].plan.kv_budget == 1000
    trainer.train()
    trainer.finish()
    trainer.close()
    found = json.loads(trainer.folder.speed.read_text())
    lines = [json.loads(line) for line in trainer.folder.metrics.open()]
    assert found["steps"] == [2, 3, 4]
    speeds = [line["tokens_per_s"] for line in lines[1:]]
    assert found["tokens_per_s"] == statistics.median(speeds)
    assert found["seconds"] == pytest.approx(256 / found["tokens_per_s"], rel=1e-9)
    errors = {"device_memory": found["device_memory"] - 1, "seconds": found["seconds"] / 3 - 1}
    assert found["over_prediction"] == errors
    parts = ("attention", "matmul", "rest", "communication", "idle")
    assert {part: found["predicted"][f"{part}_s"] for part in parts} == {
        **dict.fromkeys(parts, 0.5),
        "rest": 1.0,
    }
    assert (trainer.folder.path / "speed.png").stat().st_size > 1000
    assert not checkpoints_in(trainer.folder.checkpoints)
    assert not trainer.folder.summary.exists()
    assert not trainer.folder.evaluations.read_text()
    reported = [x for x in events(Path(config.run.dir)) if x.startswith("first step against its")]
    assert len(reported) == 1


@pytest.mark.parametrize(
    ("key", "wrong", "valid"),
    [("train.eval_every", 100, 0), ("checkpoint.every", 5, 0), ("train.steps", 1, 2)],
)
def test_other_work_than_steps_after_the_first_is_refused(
    config: Config, key: str, wrong: int, valid: int
) -> None:
    check(config, world=1)
    section, _, name = key.partition(".")
    setattr(getattr(config, section), name, wrong)
    if key == "train.steps":
        config.optim.warmup_steps = 0
    with pytest.raises(ConfigError, match=f"{key}={wrong}: .* nearest valid: {key}={valid}$"):
        check(config, world=1)
