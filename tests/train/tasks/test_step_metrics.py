"""If this fails, the reported speed is wrong. The speed of a step in its line of metrics, with a
host's clock in place of a GPU's."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.train.jobs import events, steps
from tests.train.trainers import make_trainer, shrink
from train.data.shards import open_corpus
from train.engine.parallel import ParallelLayout
from train.engine.stored_checkpoint import checkpoints_in
from train.engine.time_split import CATEGORIES, TimeSplit
from train.estimate.job import Job
from train.estimate.prediction import Prediction, predict
from train.log.speed import own_seconds
from train.log.step_lines import StepLine, StepLines
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder
from train.tasks import gradients, trainer
from train.tasks.trainer import Trainer


class HostEvent:
    """An event of a device that has done all work when the host issues the next."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        return 1e3 * (later.at - self.at)


def run(config, on_device: bool, prediction: Prediction | None = None) -> tuple[list[dict], int]:
    """The lines of a run, and how often it waited for its device."""
    waits = []
    times = TimeSplit(HostEvent, lambda: waits.append(1)) if on_device else None
    config.model.n_layers, config.train.steps, config.train.eval_every = 1, 4, 2
    config.optim.warmup_steps, config.checkpoint.every = 1, 0
    parallel = ParallelLayout(rank=0, world=1, cp=1, device=torch.device("cpu"))
    report = FailureReport(0, sys.stderr)
    with mock.patch.object(trainer, "time_split_on", return_value=times):
        made = Trainer(
            config, open_corpus(config.data), parallel, RunFolder(config), report, prediction
        )
    try:
        made.train()
    finally:
        made.close()
        trainer.set_op_hook(None)
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], len(waits)


def test_every_line_has_the_split_and_the_utilisation(config):
    """The split of step 2 to 4 sums to less than the time between lines; attention is in each.

    The run waits for the device before the first step and after the validation, in no step.
    """
    config.hardware.peak_tflops = 0.5
    begin = time.perf_counter()
    lines, waits = run(config, on_device=True)
    elapsed = time.perf_counter() - begin
    assert waits == 2
    tokens = config.data.seq_len
    for line in lines:
        seconds = tokens / line["tokens_per_s"]
        assert line["mfu"] == pytest.approx(line["flops"] / (seconds * 0.5e12))
        assert line["hfu"] > line["mfu"]
        split = {name: line[f"{name}_s"] for name in CATEGORIES}
        assert split["attention"] > 0
        assert split["matmul"] > 0
        assert split["communication"] == 0  # of one process
    assert sum(line[f"{name}_s"] for line in lines for name in CATEGORIES) < elapsed


def test_a_line_of_a_cpu_has_flops_alone(config):
    """6 FLOPs a weight and token, and 12 a pair, head and channel, of documents of up to 256."""
    lines, _ = run(config, on_device=False)
    model, tokens = config.model, config.data.seq_len
    weights = model.dim * (2 * model.dim + 2 * model.dim // 2 + 3 * model.ffn_dim + 300)
    for line in lines:
        pairs = (line["flops"] - 6 * tokens * weights) / (12 * model.dim)
        assert pairs == int(pairs)
        assert tokens <= pairs <= tokens * (tokens + 1) / 2
        assert not {"mfu", "hfu", "attention_s"} & line.keys()


def test_a_ranks_own_seconds_leave_out_what_it_waits_for():
    """Communication, and attention where ranks share a sample; on a CPU those of the process."""
    parts = {"attention": 1.0, "matmul": 2.0, "communication": 4.0, "rest": 8.0, "idle": 16.0}
    line = {f"{part}_s": seconds for part, seconds in parts.items()}
    assert set(parts) == set(CATEGORIES)
    assert own_seconds(line, 99.0, cp=1) == 27
    assert own_seconds(line, 99.0, cp=2) == 26
    assert own_seconds({"flops": 1}, 99.0, cp=2) == 99


def test_the_first_step_is_compared_with_its_prediction(config):
    """Once, in the events, relative to what was predicted."""
    config.model.head_dim, data = 64, config.data
    prediction = predict(Job(config, 1, 1, 300, [0, data.seq_len], here=True))
    lines, _ = run(config, on_device=True, prediction=prediction)
    said = [event for event in events(Path(config.run.dir)) if "prediction" in event]
    found = lines[0]["device_memory"] / 1e9
    percent = 100 * (found / (prediction.memory.device / 1e9) - 1)
    assert said == [
        f"first step against its prediction: device memory {found:.1f} GB, "
        f"predicted {prediction.memory.device / 1e9:.1f} ({percent:+.1f}%)"
    ]


def test_lines_and_batches_are_made_beside_the_device(config, monkeypatch):
    """Between the first micro-batch of a step and the wait for the device: the line of the step
    before, and the next batches begin. Other work finds the lines of all steps before it."""
    log: list[str] = []
    config.model.n_layers, config.train.steps, config.train.eval_every = 1, 6, 3
    config.optim.warmup_steps, config.checkpoint.every = 1, 5
    times = TimeSplit(HostEvent, lambda: None)
    with mock.patch.object(trainer, "time_split_on", return_value=times):
        made = make_trainer(config)

    def logged(owner: object, name: str, what: Callable[..., str]) -> None:
        call = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            log.append(what(*args))
            return result

        setattr(owner, name, wrapper)

    monkeypatch.setattr(trainer, "prime", lambda *_: None)
    logged(made.engine, "backward", lambda *_: f"issues {made.state.step + 1}")
    logged(times, "end", lambda: f"waits {made.state.step + 1}")
    logged(made.engine, "step", lambda lr: f"updates {made.state.step + 1}")
    logged(made.recorder, "step", lambda line, losses: f"line {line['step']}")
    logged(made.recorder, "evaluation", lambda line, losses: f"validates {line['step']}")
    logged(made.checkpoints, "begin", lambda step, *state: f"saves {step}")
    logged(made, "_batches", lambda sample: f"batches {sample + 1}")
    made.train()
    made.close()
    batches = [x for x in log if x.startswith("batches")]
    assert batches == [f"batches {n}" for n in range(1, 7)]
    for n in range(2, 7):
        assert log.index(f"issues {n - 1}") < log.index(f"batches {n}")
    assert [x for x in log if x not in batches] == [
        *("issues 1", "waits 1", "updates 1"),
        *("issues 2", "line 1", "waits 2", "updates 2"),
        *("issues 3", "line 2", "waits 3", "updates 3", "line 3", "validates 3"),
        *("issues 4", "waits 4", "updates 4"),
        *("issues 5", "line 4", "waits 5", "updates 5", "line 5", "saves 5"),
        *("issues 6", "waits 6", "updates 6", "line 6", "saves 6"),
    ]


class LostEvent(HostEvent):
    """An event whose device is lost once ``lost`` is set."""

    lost = False

    def elapsed_time(self, later: HostEvent) -> float:
        if LostEvent.lost:
            raise RuntimeError("an illegal memory access was encountered")
        return super().elapsed_time(later)


def test_a_run_whose_device_is_lost_has_the_lines_of_all_its_steps(config):
    """Also of the last one, which no later step has written: that has no times."""
    config.model.n_layers, config.train.steps, config.checkpoint.every = 1, 6, 0
    times = TimeSplit(LostEvent, lambda: None)
    with mock.patch.object(trainer, "time_split_on", return_value=times):
        made = make_trainer(config)
    backward = made.engine.backward

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        if made.state.step == 4:
            LostEvent.lost = True
            raise RuntimeError("a device is lost")
        return backward(*args, **kwargs)

    made.engine.backward = fail
    try:
        with pytest.raises(RuntimeError, match="a device is lost"):
            made.train()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            made.close()
    finally:
        LostEvent.lost = False
    assert [step for step, _, _ in steps(Path(config.run.dir))] == [1, 2, 3, 4]


def test_a_line_has_the_memory_of_its_own_step(config):
    """It is not that of the step during which the line is written."""
    config.model.n_layers, config.train.steps, config.checkpoint.every = 1, 4, 0
    made = make_trainer(config)
    reads = mock.Mock(side_effect=lambda _: 1000 * made.state.step)
    with mock.patch.multiple(gradients, peak_memory=reads, device_memory=reads):
        made.train()
    made.close()
    lines = map(json.loads, (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines())
    found = [(line["step"], line["memory"], line["device_memory"]) for line in lines]
    assert found == [(n, 1000 * n, 1000 * n) for n in range(1, 5)]


def test_a_line_is_written_when_any_thread_returns(config):
    """Once: the stopper may write it while the trainer does."""
    written: list[int] = []

    def slow(line: dict[str, Any], losses: list[float]) -> None:
        time.sleep(0.2)
        written.append(line["step"])

    parallel = ParallelLayout(rank=0, world=1, cp=1, device=torch.device("cpu"))
    recorder = mock.Mock(step=slow)
    lines = StepLines(config, parallel, 300, None, recorder, lambda seconds, line: None)
    lines.add(StepLine({"step": 1}, 1.0, 1.0, 10, 10, [1.0]))
    seen: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: (lines.write(), seen.append(list(written))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[1], [1]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_stop_ends_a_checkpoint_although_no_line_can_be_written(config):
    """As where a device is lost: the process exits after the error."""
    trainer = make_trainer(shrink(config))
    trainer.checkpoints.save(trainer.state)
    error = RuntimeError("device lost")
    with (
        mock.patch.object(trainer.lines, "write", side_effect=error),
        pytest.raises(RuntimeError, match="device lost"),
    ):
        trainer._save_at_once()
    assert trainer.checkpoints._writing is None
    assert list(checkpoints_in(trainer.folder.checkpoints)) == [0]
    trainer.close()
