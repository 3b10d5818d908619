"""If this fails, training skips, repeats or loses steps. The trainer in process: steps, skipped
steps and roll-backs."""

from __future__ import annotations

import json
import math
import re
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import sacrifice
from tests.train.jobs import events, steps
from tests.train.trainers import make_trainer, shrink, weights
from train.config import Config, ConfigError
from train.data.shards import open_corpus
from train.engine.parallel import ParallelLayout
from train.engine.stored_checkpoint import checkpoints_in
from train.log.introduction import introduction
from train.tasks.gradients import prime
from train.tasks.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def config(config: Config) -> Config:
    return shrink(config)


def spoil(trainer: Trainer, wrong: dict[int, float]) -> None:
    """Multiply the losses of the given steps (by their first sample) by the given factors."""
    whole, batches = trainer.model.forward, trainer._batches

    def make_batches(sample: int) -> list:
        made = batches(sample)
        for batch in made:
            batches_of[id(batch)] = (batch, wrong.get(sample // trainer.parallel.dp, 1.0))
        return made

    batches_of: dict[int, tuple] = {}
    trainer._batches = make_batches
    trainer.model.forward = lambda batch: whole(batch) * batches_of.get(id(batch), (0, 1.0))[1]


def test_a_step_that_is_not_finite_is_skipped_and_counted(config):
    trainer = make_trainer(config)
    spoil(trainer, {5: math.nan})
    trainer.train()
    trainer.close()
    recorded = steps(Path(config.run.dir))
    assert [loss is None for _, loss, _ in recorded] == [step == 6 for step in range(1, 13)]
    assert "step 6 skipped (1 so far): loss is nan" in events(Path(config.run.dir))
    assert trainer.state.spike_filter.skipped == 1
    assert trainer.state.samples == 12
    assert weights(trainer).isfinite().all()


def test_priming_and_a_skipped_step_leave_no_gradients(config):
    """The step after each has the gradients of a trainer without it, to the last bit."""
    config.model.zero_init = False
    norms = []
    for primed in (False, True):
        config.run.dir += "-new"
        trainer = make_trainer(config)
        if primed:
            prime(trainer.engine, trainer.corpus.train, config, trainer.parallel)
            assert all(p.grad is None for p in trainer.model.parameters())
            spoil(trainer, {0: math.nan})
            trainer.step(trainer._batches(0), 0.0)
            assert trainer.state.spike_filter.skipped == 1
            assert all(p.grad is None for p in trainer.model.parameters())
        norms.append(trainer.step(trainer._batches(1), 0.0)["grad_norm"])
        trainer.close()
    assert norms[0] == norms[1] > 0


def test_the_final_evaluation_is_bounded(config):
    """By the documents that reach ``train.final_eval_bytes``, if that is given."""
    config.train.final_eval_bytes, config.train.steps, config.model.vocab_size = 1000, 2, 320
    trainer = make_trainer(config)
    held_out = trainer.corpus.held_out
    last = int(held_out.n_bytes.max())
    assert held_out.n_bytes.sum() > 1000 + last
    trainer.train()
    trainer.finish()
    trainer.close()
    summary = json.loads(trainer.folder.summary.read_text())
    assert 1000 <= summary["held_out_bytes"] < 1000 + last


def test_the_losses_of_training_and_held_out_text_stand_side_by_side(config, capsys):
    """In all units in the lines and the summary; in its table without nats per byte."""
    config.train.steps, config.train.eval_every = 3, 2
    trainer = make_trainer(config)
    (batch,) = trainer._batches(0)
    trainer.train()
    trainer.finish()
    trainer.close()
    lines = [json.loads(line) for line in trainer.folder.metrics.open()]
    losses = [line["nats_per_byte"] for line in lines]
    ratio = batch.n_valid / batch.n_bytes
    assert losses[0] == pytest.approx(lines[0]["loss"] * ratio, rel=1e-6)
    assert 0.1 < ratio < 1  # tokens of several bytes
    summary = json.loads(trainer.folder.summary.read_text())
    assert summary["train_nats_per_byte"] == pytest.approx(sum(losses) / 3)
    assert summary["train_last_steps"] == 3
    assert summary["bits_per_byte"] == pytest.approx(summary["nats_per_byte"] / math.log(2))
    assert summary["train_loss"] == pytest.approx(sum(line["loss"] for line in lines) / 3)
    assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))
    found = summary["held_out_bytes"], summary["held_out_tokens"]
    assert summary["loss"] * found[1] == pytest.approx(summary["nats_per_byte"] * found[0])
    output = capsys.readouterr().out
    for label, prefix in (("held out", ""), ("train, last 3 steps", "train_")):
        loss, per_byte = summary[f"{prefix}loss"], summary[f"{prefix}nats_per_byte"]
        (line,) = [line for line in output.splitlines() if re.match(f"│ {label} +│", line)]
        cells = [cell.strip() for cell in line.split("│")[2:5]]
        assert cells == [f"{loss:.3f}", f"{math.exp(loss):.4g}", f"{per_byte / math.log(2):.3f}"]
    lines = (Path(config.run.dir) / "eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines][-1] == summary["loss"]


def _one_rank_is_wrong(group: dist.ProcessGroup, config: Config) -> tuple[list[float], int, list]:
    rank, world = group.rank(), group.size()
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    parallel = ParallelLayout(rank, world, 2, torch.device("cpu"), group, *groups)
    trainer = make_trainer(config, parallel)
    before: list[torch.Tensor] = []
    if rank == 1:
        spoil(trainer, {3: math.inf})
    take, should_skip = trainer.step, trainer.state.spike_filter.should_skip

    def step(batches: list, begin: float) -> dict:
        if trainer.state.step == 3:
            before.append(weights(trainer))
        alone = rank == 1 and trainer.state.step == 7
        trainer.state.spike_filter.should_skip = lambda figures: should_skip(figures) | alone
        record = take(batches, begin)
        if trainer.state.step == 4:
            before.append(weights(trainer))
        return record

    trainer.step = step
    if rank == 1:  # as if its device were slow; the seconds of rank 0 are measured
        write = trainer.lines.write
        trainer.lines.write = lambda: (write(), setattr(trainer.lines, "own_seconds", 50.0))
    trainer.train()
    trainer.close()
    assert torch.equal(*before)  # not even weight decay was applied
    return (
        weights(trainer).tolist(),
        trainer.state.spike_filter.skipped,
        steps(Path(config.run.dir)),
    )


def test_a_step_wrong_on_one_rank_is_skipped_on_all(config):
    """Rank 1 has infinite losses, and later objects alone: both skip, and stay bitwise equal."""
    open_corpus(config.data)
    one, other = sacrifice(2, 20, _one_rank_is_wrong, config, limit=50)
    assert one[0] == other[0]
    assert all(map(math.isfinite, one[0]))
    assert one[1] == other[1] == 2
    assert "step 8 skipped (2 so far): 1 of 2 ranks reject its loss or gradient norm" in events(
        Path(config.run.dir)
    )
    assert [step for step, loss, _ in one[2] if loss is None] == [4]
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines[1:]):  # each has the seconds of the step before
        assert len(line["rank_s"]) == 2
        assert line["rank_s"][1] == 50.0
        assert 0 < line["rank_s"][0] < 50.0
        assert line["slowest_rank"] == 1


def test_the_introduction_says_what_min_len_leaves_out(config, capsys):
    config.data.min_len, config.data.tokens_per_rank = 200, 1024
    trainer = make_trainer(config)
    for line in introduction(
        config, trainer.corpus, trainer.state, trainer.parallel, trainer.folder
    ):
        trainer.print_line(line)
    trainer.close()
    lengths = trainer.corpus.train.lengths
    short = int((lengths < 200).sum())
    assert 0 < short < len(lengths)
    output = capsys.readouterr().out
    assert f"tokens, {short} below data.min_len=200 left out, " in output
    assert "\n4 x 256 tokens a step, 1,024 of each rank at once; " in output


def test_a_run_that_continues_with_another_batch_says_so(config):
    """6 steps of 4 samples, then 6 of 2, accepted by name: none twice and none left out."""
    config.optim.schedule_steps = 12
    seen, said = [], []
    for batch, last, accepted in ((4, 6, []), (2, 10, ["train.global_batch_size"]), (2, 12, [])):
        config.train.global_batch_size, config.train.steps = batch, last
        if accepted:
            with pytest.raises(ConfigError, match=r"accept_changes=\[train\.global_batch_size\]"):
                make_trainer(config)
        config.checkpoint.accept_changes = accepted
        trainer = make_trainer(config)
        make_batches = trainer._batches
        trainer._batches = lambda sample, make=make_batches: seen.append(sample) or make(sample)
        trainer.train()
        trainer.close()
        said.append(trainer.state.samples)
    assert seen == [*range(0, 24, 4), *range(24, 36, 2)]
    assert said == [24, 32, 36]
    starts = ("starts at", "continues after")
    origins = [text for text in events(Path(config.run.dir)) if text.startswith(starts)]
    assert origins == [
        "starts at step 0",
        "continues after step 6, from step-00000006; a step has 2 samples from here on, 4 before",
        "continues after step 10, from step-00000010",
    ]


def test_8_bit_attention_takes_nearly_the_same_steps(config):
    """float32, the same seed, 12 steps: the loss is not the native one, but within .05% of it
    (int8) and .3% (fp8). Measured: .005% and .04%."""
    config.model.zero_init, config.model.head_dim = False, 64
    folder, losses = Path(config.run.dir), {}
    for precision in ("native", "int8", "fp8"):
        config.model.attention_precision = precision
        config.run.dir = str(folder / precision)
        trainer = make_trainer(config)
        trainer.train()
        trainer.close()
        losses[precision] = torch.tensor([step[1] for step in steps(Path(config.run.dir))])
    off = {p: (losses[p] / losses["native"] - 1).abs().max().item() for p in ("int8", "fp8")}
    assert 0 < off["int8"] < 5e-4
    assert off["int8"] < off["fp8"] < 3e-3


def test_offload_takes_the_same_steps(config):
    """float32, the same seed, 12 steps of 2 samples: loss and gradient norm to the last bit, and
    host buffers for one sample of both layers but the last."""
    config.model.zero_init, config.model.n_layers, config.train.gradient_accumulation_steps = (
        False,
        2,
        2,
    )
    config.memory.recompute, config.memory.mlp_chunk = "attention-saving", 64
    folder, found = Path(config.run.dir), []
    for offload in ("none", "all"):
        config.memory.offload, config.run.dir = offload, str(folder / offload)
        trainer = make_trainer(config)
        trainer.train()
        trainer.close()
        found.append([step[1:] for step in steps(Path(config.run.dir))])
    assert found[0] == found[1]
    assert len(found[0]) == 12
    buffers = trainer.model.transformer.offload.pool.buffers
    assert sum(len(buffer) for buffer in buffers) == 256 * 4 * (32 + 32 + 4)


def test_ringfa3_and_sdpa_take_the_same_steps(config):
    """float32, the same seed: loss and gradient norm of 12 steps within 1e-4 of each other."""
    config.model.zero_init = False  # attention counts from the first step
    folder, found = Path(config.run.dir), {}
    for attention in ("ringfa3", "sdpa"):
        config.train.attention, config.run.dir = attention, str(folder / attention)
        trainer = make_trainer(config)
        kinds = {
            type(block.attention.attend).__name__ for block in trainer.model.transformer.blocks
        }
        trainer.train()
        trainer.close()
        found[attention] = (kinds, [step[1:] for step in steps(Path(config.run.dir))])
    assert [kinds for kinds, _ in found.values()] == [{"RingFA3Attention"}, {"SdpaAttention"}]
    ours, theirs = (torch.tensor(numbers) for _, numbers in found.values())
    assert len(ours) == 12
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


def test_too_many_skips_roll_back_and_pass_the_bad_data(config):
    """Samples 5, 6 and 7 are bad: roll back to step 4, continue with sample 8."""
    config.guard.patience = 3
    trainer = make_trainer(config)
    used = []
    spoil(trainer, {5: math.nan, 6: math.nan, 7: math.nan})
    make_batches = trainer._batches
    trainer._batches = lambda sample: used.append(sample) or make_batches(sample)
    trainer.train()
    trainer.close()
    folder = Path(config.run.dir)
    assert [step for step, _, _ in steps(folder)] == list(range(1, 13))
    assert all(loss is not None for _, loss, _ in steps(folder))
    back = "3 steps in a row were skipped: rolled back from step 8 to step-00000004; training"
    assert any(event.startswith(back) for event in events(folder))
    assert trainer.state.samples == 16
    assert trainer.state.spike_filter.skipped == 3
    assert [sample for sample in used if sample > 8][-1] == 15
    assert used.count(8) == 2  # once prefetched, once used


def test_a_roll_back_passes_over_what_a_stop_saved_during_a_streak(config):
    """The weights of a streak may be its cause: with one checkpoint kept, the one before stays."""
    config.guard.patience, config.checkpoint.keep = 3, 1
    trainer = make_trainer(config)
    spoil(trainer, {5: math.nan, 6: math.nan, 7: math.nan})
    step = trainer.step

    def stopped(batches: list, begin: float) -> dict:
        record = step(batches, begin)
        if trainer.state.step == 7:
            trainer._save_at_once()
        return record

    trainer.step = stopped
    trainer.train()
    trainer.close()
    back = "3 steps in a row were skipped: rolled back from step 8 to step-00000004; training"
    assert any(event.startswith(back) for event in events(Path(config.run.dir)))
    assert trainer.state.step == 12


def test_a_run_goes_on_from_what_it_saved_after_a_roll_back(config):
    """A stop saves step 7 in a streak, and after the roll-back to 4 another one step 6."""
    config.guard.patience, config.checkpoint.keep = 3, 9
    trainer = make_trainer(config)
    spoil(trainer, {5: math.nan, 6: math.nan, 7: math.nan})
    step, taken = trainer.step, []

    def stopped(batches: list, begin: float) -> dict:
        record = step(batches, begin)
        taken.append(trainer.state.step)
        if taken[-1] == 7 or (taken[-1] == 6 and taken.count(6) == 2):
            trainer._save_at_once()
        if taken.count(6) == 2:
            raise KeyboardInterrupt
        return record

    trainer.step = stopped
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.close()
    assert list(checkpoints_in(trainer.folder.checkpoints)) == [4, 6]
    after = make_trainer(config)
    after.close()
    assert (after.state.step, after.state.samples) == (6, trainer.state.samples)


def test_a_spike_is_skipped(config):
    config.guard.sigma, config.guard.window = 5.0, 4
    trainer = make_trainer(config)
    spoil(trainer, {9: 1e3})
    trainer.train()
    trainer.close()
    (event,) = [e for e in events(Path(config.run.dir)) if "skipped" in e]
    assert event.startswith("step 10 skipped (1 so far): loss ")
    assert "is a spike" in event


@pytest.mark.parametrize(("every", "patience"), [(0, 2), (4, 2), (1, 3), (2, 5)])
def test_a_run_that_a_roll_back_does_not_help_ends_with_advice(config, every, patience):
    """Also where a checkpoint would be due in the middle of the skipped steps."""
    config.guard.patience, config.checkpoint.every = patience, every
    config.train.steps = 50
    trainer = make_trainer(config)
    spoil(trainer, dict.fromkeys(range(5, 99), math.nan))
    why = "an earlier roll-back did not help" if every else "there is no checkpoint"
    with pytest.raises(
        RuntimeError, match=f"{patience} steps in a row were skipped and {why}; look at"
    ):
        trainer.train()
    trainer.close()


def test_a_run_whose_last_step_cannot_be_saved_is_not_complete(config):
    trainer = make_trainer(config)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    steps_of, limit = trainer.step, (20_000, before[1])  # metrics fit, weights do not

    def step(batches: list, begin: float) -> dict:
        if trainer.state.step == 4:
            trainer.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        return steps_of(batches, begin)

    trainer.step = step
    try:
        with pytest.raises(RuntimeError, match=r"step 12 could not be saved, .* of step 4;"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    trainer.close()
    assert not trainer.folder.summary.exists()
    again = make_trainer(config)
    assert again.state.step == 4
    again.train()
    again.close()
    assert [step for step, _, _ in steps(Path(config.run.dir))] == list(range(1, 13))
