"""If this fails, W&B lacks data, or an error of it ends training. W&B: the data sent, the id of a
resumed run, and errors that must not end training.

Against a recording stand-in for the package.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.data.shards import open_corpus
from train.engine.parallel import ParallelLayout
from train.log.wandb_run import WandbRun
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder
from train.tasks.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(config) -> RunFolder:
    made = RunFolder(config)
    made.path.mkdir()
    return made


class FakeRun:
    def __init__(self, fails: str | None) -> None:
        self.logged, self.metrics, self.finished, self.fails = [], [], False, fails

    def define_metric(self, name, **options):
        self.metrics.append((name, options))

    def log(self, values):
        if self.fails == "log":
            raise ConnectionError("no route\nto host")
        self.logged.append(values)

    def finish(self):
        if self.fails == "finish":
            raise OSError("disk full")
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A fake package that records its calls; ``fails`` names the call that raises."""
    module = types.ModuleType("wandb")
    module.calls, module.runs, module.fails = [], [], None

    def init(**settings):
        if module.fails == "init":
            raise ConnectionError("no route to host")
        module.calls.append(settings)
        module.runs.append(FakeRun(module.fails))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_scalars_config_and_id_are_sent(wandb, config, folder):
    messages = []
    config.log.wandb_project = "tales"
    run = WandbRun(config, folder, messages.append)
    run.log({"train/loss": 2.5, "train/lr": 1e-3}, step=7)
    run.close()
    (settings,), (sent,) = wandb.calls, wandb.runs
    assert settings["project"] == "tales"
    assert settings["name"] == config.run.name
    assert settings["config"]["data"]["seq_len"] == config.data.seq_len
    assert settings["dir"] == str(folder.path)
    assert sent.logged == [{"train/loss": 2.5, "train/lr": 1e-3, "step": 7}]
    assert ("*", {"step_metric": "step"}) in sent.metrics
    assert sent.finished
    assert messages == []


def test_a_resumed_run_keeps_its_id(wandb, config, tmp_path):
    for name in "aab":
        config.run.dir = str(tmp_path / name)
        Path(config.run.dir).mkdir(exist_ok=True)
        WandbRun(config, RunFolder(config), print).close()
    first, resumed, other = (settings["id"] for settings in wandb.calls)
    assert first == resumed != other
    assert all(settings["resume"] == "allow" for settings in wandb.calls)


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_an_error_is_reported_once_and_ends_nothing(wandb, config, folder, fails):
    messages = []
    wandb.fails = fails
    run = WandbRun(config, folder, messages.append)
    for step in (1, 2, 3):
        run.log({"train/loss": 1.0}, step)
    run.close()
    run.log({"train/loss": 1.0}, 4)
    (line,) = messages
    assert line.startswith("Weights & Biases is off from now on: ")
    assert "\n" not in line


def test_training_sends_the_scalars_of_tensorboard_and_resumes_the_same_run(wandb, config):
    """Every scalar of every step, to the precision of TensorBoard's float32."""
    config.model.dim, config.model.ffn_dim, config.model.n_layers = 32, 64, 1
    config.optim.warmup_steps, config.train.eval_every, config.log.wandb = 1, 2, True
    config.optim.schedule_steps = 5
    for config.train.steps in (3, 5):
        parallel = ParallelLayout(rank=0, world=1, cp=1, device=torch.device("cpu"))
        words, corpus = FailureReport(0, sys.stderr), open_corpus(config.data)
        trainer = Trainer(config, corpus, parallel, RunFolder(config), words)
        trainer.train()
        trainer.close()
    board = EventAccumulator(str(RunFolder(config).tensorboard)).Reload()
    expected = {
        (tag, event.step): event.value
        for tag in board.Tags()["scalars"]
        for event in board.Scalars(tag)
    }
    sent = [values for run in wandb.runs for values in run.logged]
    got = {
        (tag, values["step"]): value
        for values in sent
        for tag, value in values.items()
        if tag != "step"
    }
    assert {step for tag, step in got if tag == "train/loss"} == {1, 2, 3, 4, 5}
    assert {step for tag, step in got if tag == "held_out/nats_per_byte"} == {2, 4}
    assert got.keys() == expected.keys()
    for key, value in got.items():
        assert value == pytest.approx(expected[key], rel=1e-6)
    first, second = wandb.calls
    assert first["id"] == second["id"]
    assert [run.finished for run in wandb.runs] == [True, True]
