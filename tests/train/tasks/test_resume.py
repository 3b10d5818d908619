"""If this fails, a run starts from the wrong step, weights or data. The start of a run: the state,
the weights and the settings that it goes on from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.train.held_runs import hold_run
from tests.train.jobs import events, steps
from tests.train.trainers import make_trainer, shrink, tensors_of, weights
from train.config import Config, ConfigError
from train.engine.parallel import ParallelLayout
from train.engine.stored_checkpoint import checkpoints_in
from train.model import initialise
from train.run.run_folder import RunFolder
from train.sections.data import SourceConfig
from train.tasks.load_model import load_model
from train.tasks.resume import prepare_folder

ALONE = ParallelLayout(0, 1, 1, torch.device("cpu"))
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def config(config: Config) -> Config:
    return shrink(config)


def test_the_origin_is_that_of_the_start_that_made_a_checkpoint(config, tmp_path):
    """A start that was killed before its first checkpoint leaves no settings to a later one."""
    folder = RunFolder(config)

    def start_with(name: str) -> str:
        theirs = tmp_path / name
        theirs.mkdir(exist_ok=True)
        (theirs / "config.json").write_text(json.dumps({"name": name}))
        config.checkpoint.init_from = f"hf:{theirs}"
        folder.path.mkdir(exist_ok=True)
        prepare_folder(config, folder, ALONE, mock.Mock())
        kept: Path = folder.origin / "config.json"
        return json.loads(kept.read_text())["name"]

    assert start_with("first") == "first"
    assert start_with("second") == "second"
    (folder.checkpoints / "step-00000003").mkdir()
    hold_run(config)
    assert start_with("third") == "second"


def test_a_restart_goes_on_only_in_a_folder_that_its_job_has_prepared(config):
    """The settings, `resume=never` and `overwrite` are judged once for each job, and not forgotten
    when torchrun restarts a job that was refused."""
    folder = RunFolder(config)
    layout = lambda job, restarted: dataclasses.replace(ALONE, job=job, restarted=restarted)  # noqa: E731

    def prepare(job: str, restarted: bool, **changes: object) -> None:
        changed = dataclasses.replace(config, **changes)
        prepare_folder(changed, folder, layout(job, restarted), mock.Mock())

    prepare("first", restarted=False)
    hold_run(config)
    never = dataclasses.replace(config.checkpoint, resume="never")
    prepare("first", restarted=True, checkpoint=never)
    hot = dataclasses.replace(config.optim, lr=0.5)
    for restarted in (False, True):
        with pytest.raises(ConfigError, match=r"with different settings: optim\.lr was "):
            prepare("second", restarted, optim=hot)
        with pytest.raises(
            ConfigError, match=r"already contains a run and checkpoint\.resume=never"
        ):
            prepare("second", restarted, checkpoint=never)
    replacing = dataclasses.replace(config.run, overwrite=True)
    prepare("third", restarted=True, optim=hot, run=replacing)  # its first attempt came to nothing
    assert not folder.metrics.exists()
    folder.metrics.touch()
    prepare("third", restarted=True, optim=hot, run=replacing)
    assert folder.metrics.exists()


def run_with_linked_checkpoints(config, tmp_path):
    """The run's folder, and the folder to which its ``checkpoints/`` links, after two steps."""
    config.train.steps = 2
    trainer = make_trainer(config)
    trainer.train()
    trainer.close()
    folder, disk = RunFolder(config), tmp_path / "disk"
    folder.checkpoints.rename(disk)
    folder.checkpoints.symlink_to(disk)
    return folder, disk


@pytest.mark.parametrize("metrics", [True, False])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_overwrite_starts_anew_where_checkpoints_is_a_link(config, tmp_path, resume, metrics):
    folder, disk = run_with_linked_checkpoints(config, tmp_path)
    assert checkpoints_in(folder.checkpoints)
    if not metrics:
        folder.metrics.unlink()
    config.optim.lr, config.run.overwrite, config.checkpoint.resume = 1e-4, True, resume
    again = make_trainer(config)
    again.close()
    assert again.state.step == 0
    assert folder.checkpoints.is_symlink()
    assert not checkpoints_in(disk)


def test_overwrite_keeps_linked_checkpoints_from_which_the_run_is_to_start(config, tmp_path):
    _, disk = run_with_linked_checkpoints(config, tmp_path)
    config.optim.lr, config.run.overwrite, config.checkpoint.resume = 1e-4, True, str(disk)
    with pytest.raises(ConfigError, match=r"run\.overwrite=true would remove .*disk/step-"):
        make_trainer(config)
    assert checkpoints_in(disk)


def test_a_dangling_link_of_checkpoints_is_named(config, tmp_path):
    folder = RunFolder(config)
    folder.path.mkdir()
    folder.checkpoints.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"run\.dir: the folder .*/checkpoints cannot be made"):
        prepare_folder(config, folder, ALONE, mock.Mock())


def test_a_restart_without_a_name_goes_on_with_a_run_of_its_settings(config):
    """Several hosts whose agents share no store: the job never removes what may be its own."""
    folder = RunFolder(config)
    nameless = dataclasses.replace(ALONE, restarted=True)
    prepare_folder(config, folder, nameless, mock.Mock())
    hold_run(config)
    config.checkpoint.resume, config.run.overwrite = "never", True
    prepare_folder(config, folder, nameless, mock.Mock())
    assert folder.metrics.exists()
    config.checkpoint.resume, config.run.overwrite, config.optim.lr = "auto", False, 0.5
    with pytest.raises(ConfigError, match=r"with different settings: optim\.lr was "):
        prepare_folder(config, folder, nameless, mock.Mock())


def test_a_state_is_the_same_after_saving_and_loading(config, tmp_path):
    trainer = make_trainer(config)
    trainer.train()
    trainer.close()
    other = make_trainer(config)
    assert other.state.step == 12  # nothing but the final evaluation is left
    assert other.state.metadata() == trainer.state.metadata()
    tensors, loaded = tensors_of(trainer), tensors_of(other)
    assert any("exp_avg_sq" in name for name in tensors)
    assert tensors.keys() == loaded.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, loaded[name]), name
    other.close()
    config.train.steps = 11
    with pytest.raises(ConfigError, match=r"train\.steps=11 leaves no step.*train\.steps=12"):
        make_trainer(config)


def test_a_new_run_starts_from_the_state_or_the_weights_of_another(config, tmp_path):
    trainer = make_trainer(config)
    trainer.train()
    trainer.close()
    old = config.run.dir
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=f"{old}-2"))
    config.checkpoint = dataclasses.replace(config.checkpoint, resume=old)
    with pytest.raises(ConfigError, match=r"train\.steps=12 leaves no step.*train\.steps=13"):
        make_trainer(config)
    config.train = dataclasses.replace(config.train, steps=13)
    heir = make_trainer(config)
    heir.close()
    assert heir.state.step == 12
    assert torch.equal(weights(heir), weights(trainer))
    config.run.dir, config.checkpoint.resume, config.checkpoint.init_from = f"{old}-3", "auto", old
    novice = make_trainer(config)
    novice.close()
    assert (novice.state.step, novice.state.samples) == (0, 0)
    assert torch.equal(weights(novice), weights(trainer))
    assert not any(t.any() for n, t in tensors_of(novice).items() if n.startswith("optimizer"))


def test_another_corpus_is_rejected_unless_only_weights_are_loaded(config):
    trainer = make_trainer(config)
    trainer.train()
    trainer.close()
    config.data.held_out = 0.3
    with pytest.raises(ConfigError, match=r"with different settings: data\.held_out was 0\.2"):
        make_trainer(config)
    origin = config.run.dir
    config.run.dir += "-2"
    config.checkpoint.resume = origin
    with pytest.raises(ConfigError, match=r"other samples: corpus was .*checkpoint\.init_from"):
        make_trainer(config)
    config.data.held_out, config.data.eos_token = 0.2, "none"
    with pytest.raises(ConfigError, match=r"samples: data\.eos_token was null, is now none; give"):
        make_trainer(config)
    config.data.eos_token, config.train.seed = None, 5
    with pytest.raises(ConfigError, match=r"made from other samples: train\.seed was 0, is now 5"):
        make_trainer(config)
    config.checkpoint.resume, config.checkpoint.init_from = "auto", origin
    make_trainer(config).close()


def test_a_checkpoint_of_another_model_is_rejected(config):
    make_trainer(config).train()
    origin = config.run.dir
    config.run.dir += "-2"
    config.checkpoint.init_from = origin
    config.model.ffn_dim = 48
    with pytest.raises(ConfigError, match=r"does not fit this model: .*\[64, 32\] there"):
        make_trainer(config)


def test_overwrite_starts_anew_unless_the_run_was_stopped(config):
    make_trainer(config).train()
    config.run.overwrite = True
    going_on = make_trainer(config)
    assert going_on.state.step == 12  # overwrite keeps a stopped run
    going_on.close()
    config.optim.lr /= 2
    trainer = make_trainer(config)
    assert trainer.state.step == 0
    assert not checkpoints_in(trainer.folder.checkpoints)
    assert steps(Path(config.run.dir)) == []
    trainer.close()


def test_overwrite_keeps_a_run_that_its_successor_cannot_replace(config, tmp_path):
    """The successor would start from it, from nothing, from weights of another shape, at a position
    in another stream of samples, or after its last step."""
    make_trainer(config).train()
    old = config.run.dir
    small = dataclasses.replace(config.model, ffn_dim=48)
    other = dataclasses.replace(config, model=small, run=dataclasses.replace(config.run))
    other.run.dir, other.train = f"{old}-small", dataclasses.replace(config.train, seed=5)
    make_trainer(other).train()
    shutil.copytree(old, f"{old}-copy")
    config.run.overwrite = True
    config.optim.lr /= 2
    step = f"{old}/checkpoints/step-00000008"
    for key, origin, problem in (
        ("init_from", old, "would remove"),
        ("resume", step, "would remove .*step-00000008, from which"),
        ("init_from", str(tmp_path), "contains no checkpoint"),
        ("init_from", other.run.dir, "does not fit this model"),
        ("resume", other.run.dir, r"made from other samples: train\.seed was 5"),
        ("resume", f"{old}-copy", r"train\.steps=12 leaves no step"),
    ):
        given = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint))
        setattr(given.checkpoint, key, origin)
        with pytest.raises(ConfigError, match=problem):
            make_trainer(given)
        assert list(checkpoints_in(RunFolder(config).checkpoints)) == [8, 12]
        assert [n for n, _, _ in steps(Path(old))] == list(range(1, 13))


def test_a_run_named_origin_lends_its_sibling_no_settings(config):
    """An origin lies in the folder of the run, not next to it or next to a checkpoint."""
    config.run.dir = str(Path(config.run.dir).parent / "origin")
    make_trainer(config).train()
    config.run.dir = str(Path(config.run.dir).parent / "a")
    make_trainer(config).train()
    heir = dataclasses.replace(config, run=dataclasses.replace(config.run))
    for place in (config.run.dir, f"{config.run.dir}/checkpoints/step-00000008"):
        heir.run.dir += "-heir"
        heir.checkpoint = dataclasses.replace(config.checkpoint, init_from=place)
        made = make_trainer(heir)
        made.close()
        assert not made.folder.origin.exists()


def test_a_run_with_only_damaged_checkpoints_does_not_start(config):
    make_trainer(config).train()
    for path in checkpoints_in(RunFolder(config).checkpoints).values():
        (path / ".metadata").unlink()
    for _ in range(2):  # the second time they are already quarantined
        with pytest.raises(ConfigError, match="every checkpoint of this run is damaged"):
            make_trainer(config)
    assert steps(Path(config.run.dir))[-1][0] == 12


def stage_2(config: Config, text_folder: Path, origin: str) -> Config:
    """``config`` as a second stage: another mixture, length, RoPE, seed, schedule and batch."""
    deep = SourceConfig(path=str(text_folder / "deep"), weight=3.0)
    both = {"all": SourceConfig(path=str(text_folder)), "deep": deep}
    data = dataclasses.replace(config.data, path=None, sources=both, seq_len=384)
    data.tokenizer = f"{origin}/tokenizer.json"
    rope = dataclasses.replace(config.model.rope, theta=80000.0)
    return dataclasses.replace(
        config,
        data=data,
        model=dataclasses.replace(config.model, rope=rope),
        optim=dataclasses.replace(config.optim, lr=5e-4, warmup_steps=1),
        train=dataclasses.replace(config.train, steps=6, seed=3, global_batch_size=2),
        run=dataclasses.replace(config.run, dir=f"{origin}-2"),
        checkpoint=dataclasses.replace(config.checkpoint, resume=origin),
    )


def test_a_second_stage_keeps_weights_and_moments_under_other_data(config, text_folder):
    """It begins at step 0 of its own data; the same command continues it.

    Its documents have ends, those of the first stage have none. Nothing else accepts that.
    """
    config.data.eos_token = "none"
    first = make_trainer(config)
    first.train()
    first.close()
    config.data.eos_token = None
    config.checkpoint.accept_changes = ["data.eos_token"]
    with pytest.raises(ConfigError, match=r"other samples: data\.eos_token was none, is now null"):
        make_trainer(config)
    config.checkpoint.accept_changes = []
    second = stage_2(config, text_folder, config.run.dir)
    with pytest.raises(ConfigError, match=r"other samples: .*checkpoint\.reset_data=true keeps"):
        make_trainer(second)
    second.checkpoint.reset_data = True
    trainer = make_trainer(second)
    assert (trainer.state.step, trainer.state.samples) == (0, 0)
    assert [stage.corpus.train.has_eos for stage in (first, trainer)] == [False, True]
    tensors, before = tensors_of(trainer), tensors_of(first)
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert any(t.any() for name, t in tensors.items() if "exp_avg_sq" in name)
    trainer.train()
    trainer.close()
    second.train.steps, second.optim.schedule_steps = 8, 6
    again = make_trainer(second)
    again.close()
    assert (again.state.step, again.state.samples) == (6, 12)
    assert [n for n, _, _ in steps(Path(second.run.dir))] == list(range(1, 7))
    origins = [e for e in events(Path(second.run.dir)) if "step" in e]
    assert origins[0].startswith("starts at step 0 with the weights and Adam's moments of ")


@pytest.mark.parametrize("key", ["init_from", "resume"])
def test_weights_of_other_tokens_are_refused(config, text_folder, tmp_path, key):
    make_trainer(config).train()
    origin = config.run.dir
    heir = stage_2(config, text_folder, origin)
    heir.data.tokenizer, heir.data.sources = None, {"deep": heir.data.sources["deep"]}
    heir.checkpoint = dataclasses.replace(config.checkpoint, reset_data=key == "resume")
    setattr(heir.checkpoint, key, origin)
    with pytest.raises(
        ConfigError, match=rf"was made with other tokens; give data\.tokenizer={origin}/tokenizer"
    ):
        make_trainer(heir)


def test_no_weights_are_drawn_that_a_start_loads(config, monkeypatch, tmp_path):
    """A run that continues, one from another's weights, and a loaded model; a new run draws."""
    drawn, draw = [], initialise.draw
    monkeypatch.setattr(initialise, "draw", lambda *a: (drawn.append(1), draw(*a)))
    by_torch = lambda values, *a, **k: values.is_meta or drawn.append(1)  # noqa: E731
    monkeypatch.setattr(torch.nn.init, "normal_", by_torch)
    config.train.steps, config.optim.schedule_steps, config.optim.final_lr_ratio = 4, 8, 0.1

    def start(**changes: object) -> tuple[bool, torch.Tensor]:
        drawn.clear()
        changed = dataclasses.replace(config, **changes)
        trainer = make_trainer(changed)
        trainer.close()
        return bool(drawn), weights(trainer)

    trainer = make_trainer(config)
    assert drawn
    trainer.train()
    trainer.close()
    trained = weights(trainer)
    more = dataclasses.replace(config.train, steps=8)
    again, values = start(train=more)
    assert not again
    assert torch.equal(values, trained)
    other = dataclasses.replace(config.run, dir=str(tmp_path / "other"))
    origin = dataclasses.replace(config.checkpoint, init_from=config.run.dir)
    again, values = start(run=other, checkpoint=origin)
    assert not again
    assert torch.equal(values, trained)
    drawn.clear()
    loaded = load_model(config, RunFolder(config), ALONE, None, print)
    assert not drawn
    assert torch.equal(
        torch.cat([p.detach().flatten() for p in loaded.model.parameters()]), trained
    )
    over = dataclasses.replace(config.run, overwrite=True)
    never = dataclasses.replace(config.checkpoint, resume="never")
    again, values = start(run=over, checkpoint=never)
    assert again
    assert not torch.equal(values, trained)
