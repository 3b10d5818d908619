"""The training loop: set-up, optimiser steps, validation, checkpoints, summary."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from ringfa3.custom_op import set_op_hook
from train.config import Config
from train.console import LineConsole
from train.data.batches import Batch, Prefetch, make_batch
from train.data.mixture import training_samples
from train.data.samples import Budget, concatenate
from train.data.shards import Corpus
from train.data.tokenizer import vocabulary_size
from train.engine.checkpoint import Checkpoints
from train.engine.make_engine import make_engine
from train.engine.parallel import ParallelLayout, require_agreement, require_shared
from train.engine.stored_checkpoint import read_manifest_metadata
from train.engine.time_split import time_split_on
from train.engine.train_state import TrainState
from train.estimate.prediction import Prediction
from train.log.introduction import introduction
from train.log.metrics import Recorder
from train.log.plots import draw, plot_speed
from train.log.profiler import profiled
from train.log.progress import StepProgress
from train.log.step_lines import StepLine, StepLines
from train.log.wandb_run import WandbRun
from train.model.window import widest
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder, write_atomically
from train.run.schedule import learning_rate
from train.run.stopper import Run
from train.run.update_lock import UpdateLock
from train.tasks.estimate import errors_of, speed_of_run
from train.tasks.evaluate import Evaluation, budget_of, evaluate
from train.tasks.gradients import compute_gradients, prime
from train.tasks.resume import loads_weights, prepare_folder, restore
from train.tasks.summary import summarise, write_summary

SELF_ONLY = (0, 0)  # attention window (left, right) in which each token attends only to itself


class Trainer:
    """One rank of a training run."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        parallel: ParallelLayout,
        folder: RunFolder,
        report: FailureReport,
        prediction: Prediction | None = None,
    ) -> None:
        self.config, self.corpus, self.parallel = config, corpus, parallel
        self.folder, self.report, self.prediction = folder, report, prediction
        self.console = LineConsole(quiet=parallel.rank != 0)
        config_json = json.dumps(dataclasses.asdict(config), indent=1)
        digest = hashlib.sha256(config_json.encode()).hexdigest()[:12]
        require_agreement(parallel, {"configuration": digest, "corpus": corpus.digest})
        data, train = config.data, config.train
        self.accumulation = config.accumulation_over(parallel.dp)
        self.samples = training_samples(corpus.train, data, train.seed)
        draw = not loads_weights(config, folder, parallel)
        self.engine = make_engine(config, vocabulary_size(corpus.tokenizer), parallel, draw)
        self.model = self.engine.model
        self.specs = self.model.kernel_specs(parallel.device)
        self.times = time_split_on(parallel.device)
        if self.times is not None:
            set_op_hook(self.times.op)
            self.engine.watch(self.times)
        self.state = TrainState(config, corpus, self.engine)
        self.updates = UpdateLock()
        self.updated: torch.cuda.Event | None = None  # recorded after the latest update
        section = config.checkpoint
        self.checkpoints = Checkpoints(
            folder.checkpoints, parallel, section.keep, section.keep_every, self._log_event
        )
        self.recorder: Recorder | None = None
        self.ahead: Prefetch[list[Batch]] | None = None
        self.mfu: float | None = None  # of the latest step with a complete line
        self.timed: list[dict[str, Any]] = []  # the lines of a speed test, with seconds
        self._predicted = False  # whether the errors of the prediction were reported
        self._rolled_back_to = -1
        self._begin(config_json)
        rows = self.model.transformer.rows
        self.lines = StepLines(config, parallel, rows, self.times, self.recorder, self._written)

    def _begin(self, config_json: str) -> None:
        """Continue the run in the folder, or start a new one there."""
        prepare_folder(self.config, self.folder, self.parallel, self.state)
        require_shared(self.parallel, self.folder.checkpoints)
        if self.parallel.rank == 0:
            self.checkpoints.remove_partial_files()
        source = restore(self.config, self.state, self.checkpoints, self.print_line)
        if self.parallel.rank == 0:
            tokenizer = self.corpus.tokenizer.to_str(pretty=True)
            self.folder.record_start(config_json, tokenizer, self.corpus.chat_template)
            wandb = None
            if self.config.log.wandb:
                wandb = WandbRun(self.config, self.folder, self.print_line)
            self.recorder = Recorder(self.folder, self.state.step, self.print_line, wandb)
        self._log_event(source)

    def print_line(self, text: str) -> None:
        """Print a line on the console of rank 0."""
        self.console.print(text)

    def _log_event(self, text: str) -> None:
        self.print_line(text)
        if self.recorder is not None:
            self.recorder.event(self.state.step, text)

    def close(self) -> None:
        """Close the files of the run, and remove the hook on its ops."""
        set_op_hook(None)
        try:
            self.lines.write()
        finally:
            if self.recorder is not None:
                self.recorder.close()

    def _close_at_once(self) -> None:
        self.close()
        self.console.show_cursor()  # a progress bar hides it

    def stoppable(self, deadline: float | None) -> Run:
        """This run, in the form in which the stopper can save and end it at any moment."""
        parallel = self.parallel
        return Run(
            rank=parallel.rank,
            world=parallel.world,
            store=None if parallel.store is None else parallel.store.clone(),
            updates=self.updates,
            save=self._save_at_once,
            log=self._log_event,
            fail=self.report.not_saved,
            close=self._close_at_once,
            deadline=deadline if parallel.rank == 0 else None,
            update_s=self.config.checkpoint.stop_s,
        )

    def train(self) -> None:
        """Run all optimiser steps, with validations and checkpoints in between."""
        for line in introduction(self.config, self.corpus, self.state, self.parallel, self.folder):
            self.print_line(line)
        prime(self.engine, self.corpus.train, self.config, self.parallel)
        steps = self.config.train.steps
        profile = profiled(
            self.config.profile,
            self.folder.profile,
            self.parallel.rank,
            self.parallel.device,
            self.state.step,
        )
        with StepProgress(self.console, steps) as progress, profile as step_done:
            while self.state.step < steps:
                self._train_on(progress, step_done)
        if self.config.train.speed_test:
            self.lines.write()
        else:
            self._require_saved()

    def _train_on(self, progress: StepProgress, step_done: Callable[[], None]) -> None:
        """Run steps until the last one, or until a roll-back."""
        train, state = self.config.train, self.state
        first, offset, stride = state.step, state.samples, state.batch
        every = self.config.checkpoint.every
        if self.times is not None:
            self.times.begin_outside_a_step()
        make = lambda step: self._batches(offset + (step - first) * stride)  # noqa: E731
        previous = time.perf_counter()
        with Prefetch(make, first, train.steps) as self.ahead:
            for batches in self.ahead:
                if self.times is None:  # the host computes, and never waits
                    self.ahead.begin()
                self.report.begin_step(state.step + 1)
                record = self.step(batches, previous)
                step_done()
                previous = time.perf_counter()
                progress.update(record, self.mfu)
                if state.spike_filter.out_of_patience:
                    self._roll_back()
                    return
                if self._is_due(train.eval_every) and state.step < train.steps:
                    self._validate(progress)
                    previous = time.perf_counter()
                # Do not save during skipped steps: these weights may be their cause.
                if self._is_due(every) and not state.spike_filter.consecutive_skips:
                    self._save()

    def _is_due(self, every: int) -> bool:
        """Whether what happens each ``every`` steps, never if it is 0, follows this step."""
        return every > 0 and self.state.step % every == 0

    def step(self, batches: list[Batch], begin: float) -> dict[str, Any]:
        """One optimiser step, begun at ``begin`` of ``perf_counter``; returns its main figures.

        Either every rank updates or every rank skips: one rank whose spike filter skips is enough.
        The step's metrics line is written concurrently with the next step, or before other work.
        """
        parallel, optim, state = self.parallel, self.config.optim, self.state
        spikes, cpu_begin = state.spike_filter, time.process_time()
        figures = compute_gradients(
            self.engine, batches, self.config, parallel, spikes, self.times, self._meanwhile
        )
        loss, grad_norm = figures.loss, figures.grad_norm
        skip_reason = None
        if figures.skip_votes:
            others = (
                f"{figures.skip_votes} of {parallel.world} ranks reject its loss or gradient norm"
            )
            skip_reason = spikes.skip_reason(loss, grad_norm) or others
        lr = learning_rate(optim, state.step, self.config.train.steps)
        with self.updates.update():
            if skip_reason is None:
                self.engine.step(lr)
                spikes.accept(loss, grad_norm)
            else:
                self.engine.discard()
                spikes.skip()
            if parallel.device.type == "cuda":
                self.updated = torch.cuda.current_stream().record_event()
            seconds = time.perf_counter() - begin
            state.step += 1
            state.samples += state.batch
            state.seconds += seconds
            record = figures.record(state, lr, seconds, parallel.device)
            cpu_seconds = time.process_time() - cpu_begin
            counts = figures.tokens, figures.pairs, figures.loss_by_bucket
            self.lines.add(StepLine(record, seconds, cpu_seconds, *counts))
        if skip_reason is not None:
            self._log_event(f"step {state.step} skipped ({spikes.skipped} so far): {skip_reason}")
        return record

    def _meanwhile(self) -> float:
        """The host's work while the device computes a step: next batches, last metrics line.

        Returns the seconds of this rank's own work in the step before.
        """
        if self.ahead is not None:
            self.ahead.begin()
        self.lines.write()
        return self.lines.own_seconds

    def _written(self, seconds: float, record: dict[str, Any]) -> None:
        """Note the MFU of a step. After the first one report the errors of the prediction."""
        self.mfu = record.get("mfu")
        if self.config.train.speed_test:
            self.timed.append({**record, "seconds": seconds})
        if self.prediction is None or self._predicted:
            return
        offload = self.model.transformer.offload
        moved = 0 if offload is None else sum(b.nbytes for b in offload.pool.buffers)
        line = errors_of(self.prediction, seconds, record["device_memory"], moved)
        self._predicted = True
        self._log_event(line)

    def _save(self) -> None:
        """Start to save the current state."""
        self.lines.write()  # every step in a checkpoint has a line
        self.checkpoints.save(self.state, self.updated)

    def _save_at_once(self) -> str:
        """Save the state for the stopper and return a message, or raise an error."""
        if self.parallel.device.type == "cuda":
            torch.cuda.set_device(self.parallel.device)
        self._require_saved()
        step = self.state.step
        return f"stopped after step {step}, which is saved; the same command continues from there"

    def _require_saved(self) -> None:
        """Save the current state if it is not saved yet; ``RuntimeError`` if that fails."""
        self.checkpoints.wait()  # a write must end even where a lost device leaves no line
        self.lines.write()
        self.checkpoints.require_saved(self.state, self.updated)

    def _roll_back(self) -> None:
        """After too many skipped steps, load an earlier checkpoint and continue with later data.

        It is the newest checkpoint that was not saved while skipping. Raises ``RuntimeError`` if
        there is none, or none that is newer than that of the previous roll-back.
        """
        self.lines.write()
        self.checkpoints.wait()
        skipped = self.state.spike_filter.consecutive_skips
        path = self.checkpoints.choose(exclude_skipping=True)
        step = -1 if path is None else read_manifest_metadata(path)["step"]
        if path is None or step <= self._rolled_back_to:
            why = "there is no checkpoint" if path is None else "an earlier roll-back did not help"
            raise RuntimeError(
                f"{skipped} steps in a row were skipped and {why}; look at the losses in "
                f"{self.folder.metrics}, at the data, and at optim.lr"
            )
        left = self.state.step
        with self.updates.update():
            self.state.roll_back(path)
            self.checkpoints.remove_after(step)
            if self.recorder is not None:
                self.recorder.roll_back(self.state.step)
        self._rolled_back_to = step
        self._log_event(
            f"{skipped} steps in a row were skipped: rolled back from step {left} to {path.name}; "
            f"training continues with later data"
        )

    def finish(self) -> None:
        """Run the final evaluation, write ``summary.json`` and the plots, print a table.

        With ``train.speed_test`` write ``speed.json`` alone.
        """
        if self.config.train.speed_test:
            self._write_speed()
            return
        budget = budget_of(self.config, "final_eval_bytes")
        full = self._evaluate(budget)
        alone = self._evaluate(budget, SELF_ONLY)
        length = self.config.train.final_eval_len
        short = None if length is None else self._evaluate(budget, length=length)
        if self.recorder is None:
            return
        self._record_evaluation(full)
        self.print_line("Counting the baselines ...")
        summary = summarise(self.state, self.folder, full, alone, short)
        write_summary(self.folder, summary, full, alone, self.console)

    def _write_speed(self) -> None:
        if self.parallel.rank == 0:
            found = speed_of_run(self.prediction, self.timed)
            write_atomically(self.folder.speed, json.dumps(found, indent=1) + "\n")
            for name, error in found.get("over_prediction", {}).items():
                self.print_line(f"{name} of steps 2 on, over the prediction: {100 * error:+.1f}%")
            draw(lambda: plot_speed(self.folder.path / "speed.png", found), self.console)
            self.print_line(f"Written to {self.folder.speed}")

    def _batches(self, sample: int) -> list[Batch]:
        """This rank's micro-batches of the step whose first sample is number ``sample``."""
        parallel, at_once = self.parallel, self.config.samples_at_once()
        numbers = [m * parallel.dp + parallel.dp_rank for m in range(self.accumulation)]
        firsts = [sample + number * at_once for number in numbers]
        sharding = (parallel.cp_group, self.config.parallel.layout, widest(self.config.model))
        samples = (concatenate([self.samples[x + n] for n in range(at_once)]) for x in firsts)
        given = *sharding, self.specs, self.config.parallel.kv_budget
        return [make_batch(sample, *given) for sample in samples]

    def _evaluate(
        self,
        budget: Budget,
        window: tuple[int, int] = (-1, -1),
        length: int | None = None,
    ) -> Evaluation:
        if self.times is not None:
            self.times.pause()
        what = (self.engine.evaluate, self.corpus.held_out, self.config, self.parallel)
        return evaluate(*what, budget, window, length)

    def _validate(self, progress: StepProgress) -> None:
        self.lines.write()
        result = self._evaluate(budget_of(self.config, "eval_bytes"))
        self._record_evaluation(result)
        loss = result.nats_per_token, result.nats_per_byte
        progress.validated(self.state.step, *loss, result.n_bytes)
        if self.times is not None:
            self.times.begin_outside_a_step()

    def _record_evaluation(self, evaluation: Evaluation) -> None:
        if self.recorder is not None:
            record = evaluation.record(self.state.step)
            self.recorder.evaluation(record, evaluation.loss_by_bucket)
