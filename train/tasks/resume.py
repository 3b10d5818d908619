"""The start of a run: its folder, and the checkpoint that it continues from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from train.config import CheckpointConfig, Config, ConfigError
from train.engine.checkpoint import Checkpoints
from train.engine.parallel import ParallelLayout, from_rank_0
from train.engine.stored_checkpoint import (
    DAMAGED,
    checkpoints_in,
    find_checkpoint,
    read_manifest_metadata,
    require_fit,
)
from train.engine.train_state import TrainState
from train.hf.architecture import hf_folder
from train.hf.load import load_folder
from train.hf.origin import keep_origin
from train.paths import expand, make_folder
from train.run.recipe_change import Change, recipe_changes, require_recipe
from train.run.run_folder import RunFolder


def prepare_folder(
    config: Config, folder: RunFolder, parallel: ParallelLayout, state: TrainState
) -> None:
    """Create the run folder, or check that its contents belong to this run. Rank 0 does the work.

    A job that torchrun has restarted continues, without a check, in a folder that it has prepared
    before. Raises ``ConfigError`` on every rank

    * if the folder contains anything else,
    * or if the run would replace another one there, but could not start from ``checkpoint``.
    """

    def prepare() -> None:
        if not (parallel.restarted and _has_prepared(parallel.job, config, folder)):
            folder.require_fit(config)
            if folder.is_replaced_by(config):
                _require_origin(config, folder, state)
                folder.clear()
        folder.set_job(parallel.job)
        make_folder("run.dir", folder.checkpoints)
        if not checkpoints_in(folder.checkpoints):  # the run starts with these weights
            keep_origin(_settings_of(config.checkpoint), folder.origin)

    from_rank_0(parallel, prepare)


def loads_weights(config: Config, folder: RunFolder, parallel: ParallelLayout) -> bool:
    """Whether ``restore`` loads all weights or raises, the same on all ranks: none need be drawn.

    A run that is replaced starts anew, even if its folder has checkpoints.
    """
    if config.checkpoint.init_from is not None or config.checkpoint.resumes():
        return True

    def continues() -> bool:
        return bool(checkpoints_in(folder.checkpoints)) and not folder.is_replaced_by(config)

    return from_rank_0(parallel, continues)


def _has_prepared(job: str, config: Config, folder: RunFolder) -> bool:
    """Whether a restarted job has prepared the folder.

    A job without an id assumes so if the folder contains a run with its settings, because it never
    removes such a run.
    """
    if job:
        return folder.job() == job
    return folder.holds_run() and folder.difference(config) is None


def restore(
    config: Config, state: TrainState, checkpoints: Checkpoints, log: Callable[[str], None]
) -> str:
    """Load the state that the run continues from, if any; returns a line that names its origin.

    A checkpoint of the run itself has priority over ``checkpoint.resume`` and ``init_from``. Raises
    ``ConfigError`` if every checkpoint of the run is damaged, or if the recipe of the run itself
    has changed without ``checkpoint.accept_changes``.
    """
    own = checkpoints.choose()
    if own is None and any(checkpoints.folder.glob(f"{DAMAGED}*")):
        raise ConfigError(
            f"run.dir={config.run.dir}: every checkpoint of this run is damaged "
            f"(checkpoints/{DAMAGED}*); start again in another folder, with "
            f"run.overwrite=true checkpoint.resume=never, or from another run's checkpoint"
        )
    steps = config.train.steps
    if own is not None:
        changes = require_recipe(config, state.batch, read_manifest_metadata(own))
        state.load(own)
        _require_steps(own, state.step, least=state.step, steps=steps)
        checkpoints.saved = state.step
        return f"continues after step {state.step}, from {own.name}{_listed(changes)}"
    if theirs := hf_folder(config.checkpoint.init_from):
        load_folder(theirs, state.shards())
        state.engine.loaded()
        return f"starts at step 0 with the weights of {theirs}"
    origin = _origin(config.checkpoint)
    if origin is None:
        if not state.engine.draw:
            raise RuntimeError(
                f"the checkpoints in {checkpoints.folder} have vanished; start again"
            )
        return "starts at step 0"
    path = from_rank_0(checkpoints.parallel, lambda: find_checkpoint(origin, log))
    if _begins_anew(config.checkpoint):
        state.require_vocabulary(path)
        state.start_from(path)
        moments = " and Adam's moments" if config.checkpoint.reset_data else ""
        return f"starts at step 0 with the weights{moments} of {path}"
    changes = recipe_changes(config, state.batch, state.metadata_of(path))
    state.load(path)
    _require_steps(path, state.step, least=state.step + 1, steps=steps)
    return f"continues after step {state.step}, from {path}{_listed(changes)}"


def _listed(changes: dict[str, Change]) -> str:
    return "".join(f"; {change.text}" for change in changes.values())


def _require_steps(path: Path, step: int, least: int, steps: int) -> None:
    """Raise ``ConfigError`` if the run ends before step ``least``.

    A run's own checkpoint may be that of its last step, after a kill before the final evaluation.
    """
    if steps < least:
        raise ConfigError(
            f"{path} is the state after step {step}, and train.steps={steps} leaves no step; "
            f"nearest valid: train.steps={least}"
        )


def _begins_anew(checkpoint: CheckpointConfig) -> bool:
    """Whether a run that starts from another one begins at step 0."""
    return checkpoint.init_from is not None or checkpoint.reset_data


def _origin(checkpoint: CheckpointConfig) -> Path | None:
    """The run, or the checkpoint of one, from which a new run starts, if any."""
    given = checkpoint.resume if checkpoint.resumes() else checkpoint.init_from
    if given is None or hf_folder(checkpoint.init_from):
        return None
    return expand("checkpoint.resume" if checkpoint.resumes() else "checkpoint.init_from", given)


def _require_origin(config: Config, replaced: RunFolder, state: TrainState) -> None:
    """Raise ``ConfigError`` if the run names a checkpoint to start from, and cannot load it after
    the run in ``replaced`` is removed."""
    origin = _origin(config.checkpoint)
    if origin is None:
        return
    path = find_checkpoint(origin, lambda _: None)  # `restore` logs damaged checkpoints
    if {replaced.path.resolve(), replaced.checkpoints.resolve()} & set(path.resolve().parents):
        raise ConfigError(
            f"run.overwrite=true would remove {path}, from which the run is to start; give the new "
            f"run another folder, with run.name or run.dir"
        )
    if _begins_anew(config.checkpoint):
        state.require_vocabulary(path)
        require_fit(path, state.initial())
        return
    step = state.metadata_of(path)["step"]
    _require_steps(path, step, least=step + 1, steps=config.train.steps)
    require_fit(path, state.shards())


def _settings_of(checkpoint: CheckpointConfig) -> Path | None:
    """The folder with the Hugging Face settings of a new run's initial weights, if there is one."""
    if theirs := hf_folder(checkpoint.init_from):
        return theirs
    path = _origin(checkpoint)
    if path is None:
        return None
    run = path.parents[1] if path.parent.name == "checkpoints" else path
    return run / "origin" if (run / "origin").is_dir() else None
