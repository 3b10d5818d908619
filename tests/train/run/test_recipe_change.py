"""If this fails, a resumed run changes its learning rate or batch unasked. A run that continues
changes its learning rate and its batch only by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.train.held_runs import hold_run
from train.checks.config import check
from train.config import Config, ConfigError, OptimConfig, TrainConfig
from train.data.manifest import write_manifest
from train.run.recipe_change import recipe_changes, require_recipe
from train.run.schedule import learning_rate
from train.sections.machine import ALL


def saved(config: Config, step: int, batch: int | None = 1) -> dict[str, Any]:
    """The metadata of a checkpoint after ``step`` steps of ``config``."""
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    return {"settings": settings, "step": step, "batch": batch}


def with_steps(config: Config, steps: int, **optim: Any) -> Config:
    changed = dataclasses.replace(config.optim, **optim)
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=steps), optim=changed
    )


def test_the_same_recipe_is_no_change(config):
    assert require_recipe(config, 1, saved(config, 100)) == {}
    assert require_recipe(config, 3, saved(config, 100, batch=None)) == {}  # of an early version


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_more_steps_under_a_decay_are_refused_with_both_rates(config, schedule):
    config.optim.schedule = schedule
    before = saved(config, 200)
    longer = with_steps(config, 400)
    rates = [learning_rate(config.optim, 200, steps) for steps in (300, 400)]
    text = f"moves the learning rate of step 201 from {rates[0]:.3g} to {rates[1]:.3g}"
    with pytest.raises(ConfigError) as raised:
        require_recipe(longer, 1, before)
    assert text in str(raised.value)
    assert "accept it with checkpoint.accept_changes=[train.steps]" in str(raised.value)
    assert f"in another run.dir with checkpoint.resume={config.run.dir}, or" in str(raised.value)
    assert "schedule_steps" not in str(raised.value)  # its end would come before that of the run
    longer.checkpoint.accept_changes = ["train.steps"]
    assert text in require_recipe(longer, 1, before)["train.steps"].text


def test_fewer_steps_keep_the_schedule_by_its_length(config):
    before, shorter = saved(config, 100), with_steps(config, 200)
    with pytest.raises(ConfigError, match=r"keep it with optim\.schedule_steps=300, accept"):
        require_recipe(shorter, 1, before)
    shorter.optim.schedule_steps = 300
    assert require_recipe(shorter, 1, before) == {}
    floor = with_steps(config, 400, final_lr_ratio=0.1)
    with pytest.raises(ConfigError, match=r"keep it with optim\.schedule_steps=300, accept"):
        require_recipe(floor, 1, saved(with_steps(config, 300, final_lr_ratio=0.1), 100))
    floor.optim.schedule_steps = 300
    check(floor, world=1)
    assert learning_rate(floor.optim, 350, 400) == pytest.approx(3e-4)


def test_a_constant_phase_may_be_extended_and_its_decay_may_not(config):
    wsd = with_steps(config, 300, schedule="wsd")
    for changed in (with_steps(wsd, 600), with_steps(wsd, 600, decay_steps=200)):
        assert require_recipe(changed, 1, saved(wsd, 269)) == {}
        with pytest.raises(ConfigError, match="moves the learning rate of step 281"):
            require_recipe(changed, 1, saved(wsd, 280))


def test_a_run_at_its_end_has_no_next_step(config):
    assert require_recipe(config, 1, saved(with_steps(config, 400), 300)) == {}


def test_another_batch_is_refused_with_the_key_that_keeps_it(config):
    before = saved(config, 100, batch=2)
    with pytest.raises(
        ConfigError,
        match=r"a step has 4 samples from here on, 2 before; keep it with "
        r"train\.global_batch_size=2 .*"
        r"checkpoint\.accept_changes=\[train\.global_batch_size\]",
    ):
        require_recipe(config, 4, before)
    config.checkpoint.accept_changes = ["train.global_batch_size"]
    assert set(require_recipe(config, 4, before)) == {"train.global_batch_size"}
    assert set(recipe_changes(config, 4, before)) == {"train.global_batch_size"}


def test_the_checks_judge_the_newest_checkpoint_before_anything_starts(config):
    folder = hold_run(config)
    for step, batch in ((100, 2), (200, 4)):
        path = folder.checkpoints / f"step-{step:08d}"
        path.mkdir(parents=True)
        write_manifest(path, saved(config, step, batch), [])
    config.train.gradient_accumulation_steps = 2
    check(config, world=2)
    with pytest.raises(ConfigError, match="a step has 2 samples from here on, 4 before"):
        check(config, world=1)
    (folder.checkpoints / "step-00000200" / "manifest.json").write_text("torn")
    check(config, world=1)
    config.run.overwrite, config.checkpoint.resume = True, "never"
    check(config, world=2)


def test_one_group_keeps_its_batch_at_another_number_of_ranks_by_name(config):
    """Four ranks had two samples of 256 tokens in a step; two ranks would have one."""
    config.parallel.cp, config.data.tokens_per_rank = ALL, 128
    folder = hold_run(config.on(4))
    path = folder.checkpoints / "step-00000100"
    path.mkdir(parents=True)
    write_manifest(path, saved(config.on(4), 100, config.on(4).batch_over(1)), [])
    check(config.on(4), world=4)
    with pytest.raises(ConfigError, match=r"has 1 samples .* keep it with .*global_batch_size=2 "):
        check(config.on(2), world=2)
    config.train.global_batch_size = 2
    check(config.on(2), world=2)
    config.train.global_batch_size, config.data.tokens_per_rank = None, 256
    check(config.on(2), world=2)


def test_accepted_settings_continue_and_unknown_ones_are_named(config):
    hold_run(config)
    config.optim.lr = 1e-3
    with pytest.raises(
        ConfigError,
        match=r"optim\.lr was 0\.003, is now 0\.001; .*accept_changes=\[optim\.lr\], start a new "
        rf"run from it in another run\.dir with checkpoint\.resume={config.run.dir}",
    ):
        check(config, world=1)
    config.checkpoint.accept_changes = ["optim.lr"]
    check(config, world=1)
    config.checkpoint.accept_changes = ["optim.lr", "data.sources.web.path"]
    check(config, world=1)
    config.checkpoint.accept_changes = ["lr"]
    with pytest.raises(ConfigError, match=r"nearest valid: .*accept_changes=\[optim\.lr\]"):
        check(config, world=1)


def test_a_schedule_that_ends_early_needs_a_rate_after_its_end(config):
    config.optim = OptimConfig(schedule_steps=200)
    config.train = TrainConfig(steps=300)
    with pytest.raises(ConfigError, match=r"schedule_steps=200: .* is 0 .*schedule_steps=300"):
        check(config, world=1)


def test_a_second_stage_needs_a_folder_of_its_own(config):
    """In the folder of the first, that run would continue instead."""
    folder = hold_run(config)
    folder.checkpoints.mkdir(exist_ok=True)
    config.checkpoint.reset_data = True
    for origin in (folder.path, folder.checkpoints):
        config.checkpoint.resume = str(origin)
        with pytest.raises(
            ConfigError, match=r"begins a new run, .* lies in its run\.dir=.*run\.name"
        ):
            check(config, world=1)
    config.run.dir += "-2"
    check(config, world=1)
