"""All checks of the config that need no process group."""

from __future__ import annotations

import os

from train.checks.batch import check_batch
from train.checks.compile import check_compile
from train.checks.data import check_data, check_text, nearest_path
from train.checks.engine import check_engine
from train.checks.export import check_export
from train.checks.hardware import check_hardware
from train.checks.limits import check_limits
from train.checks.model import check_model
from train.checks.offload import check_offload
from train.checks.origin import check_origin
from train.config import RUN_MODES, Config, ConfigError
from train.extras import installed, remedy
from train.hf.architecture import hf_folder
from train.keys import nearest, schema_keys, to_schema_key
from train.paths import expand
from train.run.recipe_change import newest_metadata, require_recipe
from train.run.run_folder import RunFolder
from train.run.schedule import schedule_length, warmup_steps
from train.sections.renamed import RENAMED


def check(config: Config, world: int) -> None:
    """Raise ``ConfigError`` for the first value that cannot work with ``world`` processes."""
    check_limits(config)
    check_model(config.model)
    if config.mode == "export":
        check_export(config)
    if config.mode in ("generate", "export"):
        return
    if config.mode in RUN_MODES:
        check_text(config)
    else:
        _check_optim(config)
        check_data(config.data)
        check_offload(config.memory, config.model.n_layers)
        check_compile(config)
        check_hardware(config.hardware)
        if config.data.tokenizer is None:  # the run trains one with data.vocab_size tokens
            config.model.rows(config.data.vocab_size)
        _check_final(config)
        _check_checkpoint(config)
        check_origin(config)
        _check_log(config)
        _check_profile(config, world)
        check_engine(config.engine)
    cp = config.parallel.cp
    if world % cp:
        allowed = [n for n in range(1, world + 1) if world % n == 0]
        best = min(allowed, key=lambda n: abs(n - cp))
        raise ConfigError(
            f"parallel.cp={cp} does not divide the number of processes, {world}; "
            f"nearest valid: parallel.cp={best} (or start a multiple of {cp} processes "
            f"with torchrun --nproc-per-node)"
        )
    if config.mode == "verify" and cp == 1:
        raise ConfigError(
            "mode=verify compares parallel.cp=1 with more processes for a sample; nearest valid: "
            "parallel.cp=2 (started with torchrun --nproc-per-node 2)"
        )
    if config.mode == "verify" and config.model.attention_precision != "native":
        raise ConfigError(
            f"mode=verify with model.attention_precision={config.model.attention_precision}: its "
            "scales depend on how a sample is shared, and steps differ by more than rounding; "
            "nearest valid: model.attention_precision=native"
        )
    if config.mode not in RUN_MODES and config.train.global_batch_size is not None:
        check_batch(config.train, world // cp)
    precision, transport = config.model.attention_precision, config.parallel.transport
    if precision != "native" and cp > 1 and transport == "symmetric":
        raise ConfigError(
            f"model.attention_precision={precision} does not support "
            "parallel.transport=symmetric; nearest valid: parallel.transport=auto"
        )
    if config.train.attention == "sdpa":
        _check_sdpa(config)
    # With several hosts, this may be a restart although this host counts its first attempt. Only
    # rank 0 knows that, and only later; the trainer then checks the folder.
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if config.mode in ("train", "check") and first and not _of_several_hosts():
        folder, dp = RunFolder(config), world // cp
        folder.require_fit(config)
        saved = None if folder.is_replaced_by(config) else newest_metadata(folder)
        if saved is not None:
            require_recipe(config, config.accumulation_over(dp) * dp, saved)


def _check_sdpa(config: Config) -> None:
    key = "train.attention=sdpa"
    if config.parallel.cp > 1:
        raise ConfigError(
            f"{key} needs a whole sample in each process, and parallel.cp={config.parallel.cp} "
            f"splits it; nearest valid: parallel.cp=1 (or train.attention=ringfa3)"
        )
    if config.model.attention_precision != "native":
        raise ConfigError(
            f"{key} does not support "
            f"model.attention_precision={config.model.attention_precision}; nearest valid: "
            "model.attention_precision=native (or train.attention=ringfa3)"
        )
    if config.model.windows is not None:
        raise ConfigError(
            f"{key} does not support model.windows={config.model.windows}; nearest valid: "
            "model.windows=null (or train.attention=ringfa3)"
        )
    if config.mode not in RUN_MODES and config.memory.recompute == "attention-saving":
        raise ConfigError(
            f"{key} does not support memory.recompute=attention-saving; nearest valid: "
            f"memory.recompute=full"
        )


def _check_optim(config: Config) -> None:
    optim, steps = config.optim, config.train.steps
    length = schedule_length(optim, steps)
    if length < steps and not optim.final_lr_ratio:
        raise ConfigError(
            f"optim.schedule_steps={length}: with optim.final_lr_ratio=0 the learning rate is 0 "
            f"from there to train.steps={steps}; nearest valid: optim.schedule_steps={steps}"
        )
    decay, room = optim.decay_steps, length - warmup_steps(optim, steps)
    if decay is not None and optim.schedule != "wsd":
        raise ConfigError(
            f"optim.decay_steps={decay} is a key of optim.schedule=wsd, not of "
            f"{optim.schedule}; nearest valid: optim.decay_steps=null (or optim.schedule=wsd)"
        )
    if decay is not None and decay > room:
        best = f"optim.decay_steps={room}" if room else "optim.decay_steps=null"
        raise ConfigError(
            f"optim.decay_steps={decay} exceeds the {room} steps that the warm-up leaves of "
            f"the schedule's {length}; nearest valid: {best}"
        )


def _check_final(config: Config) -> None:
    seq_len, train = config.data.seq_len, config.train
    longest = config.data.max_doc_len or seq_len
    limits = {"final_eval_len": (train.final_eval_len, seq_len)}
    limits["final_eval_last"] = (
        train.final_eval_last,
        min(longest, train.final_eval_len or longest),
    )
    for key, (value, most) in limits.items():
        if value is not None and value > most:
            raise ConfigError(
                f"train.{key}={value} exceeds the {most} tokens that are read at once; nearest "
                f"valid: train.{key}={most}"
            )


def _check_log(config: Config) -> None:
    if config.log.wandb and not installed("wandb"):
        raise ConfigError(
            "log.wandb=true: the package wandb is not installed; "
            f"{remedy('wandb')} (or log.wandb=false)"
        )


def _check_profile(config: Config, world: int) -> None:
    profile, steps = config.profile, config.train.steps
    if profile.steps is None:
        if profile.memory:
            raise ConfigError(
                "profile.memory=true needs profile.steps, the steps whose allocations it keeps; "
                "for example profile.steps=[3,5]"
            )
        return
    wanted = profile.steps
    if not wanted[0] <= wanted[1] <= steps:
        last = min(5, steps)
        raise ConfigError(
            f"profile.steps={wanted} must be the first and the last step, from 1 to "
            f"train.steps={steps}; for example profile.steps=[{min(3, last)},{last}]"
        )
    if max(profile.ranks) >= world:
        raise ConfigError(
            f"profile.ranks={profile.ranks} must be ranks from 0 to {world - 1}; nearest valid: "
            f"profile.ranks=[{world - 1}]"
        )


def _check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    keys = schema_keys()
    for key in checkpoint.accept_changes:
        if to_schema_key(key) not in keys:
            hint = f"nearest valid: checkpoint.accept_changes=[{nearest(key, keys, cutoff=0)}]"
            if key in RENAMED:
                hint = f"its name is {RENAMED[key]} now"
            raise ConfigError(f"checkpoint.accept_changes: {key} is no key; {hint}")
    for key, value in (("resume", checkpoint.resume), ("init_from", checkpoint.init_from)):
        if value in (None, "auto", "never") or (key == "init_from" and hf_folder(value)):
            continue
        if not expand(f"checkpoint.{key}", value).is_dir():
            words = "auto, never or " if key == "resume" else ""
            raise ConfigError(
                f"checkpoint.{key}={value} must be {words}the folder of a run or of a checkpoint; "
                f"{nearest_path(value)}"
            )
    if checkpoint.reset_data and not checkpoint.resumes():
        raise ConfigError(
            "checkpoint.reset_data=true begins a second stage from another run, and "
            f"checkpoint.resume={checkpoint.resume} names none; give checkpoint.resume=PATH"
        )
    if checkpoint.reset_data:  # the checkpoints in run.dir would be those of the new run
        origin = expand("checkpoint.resume", checkpoint.resume).resolve()
        if origin.is_relative_to(RunFolder(config).path.resolve()):
            raise ConfigError(
                f"checkpoint.reset_data=true begins a new run, but checkpoint.resume="
                f"{checkpoint.resume} lies in its run.dir={config.run.dir}; give the new run "
                f"another folder, with run.name or run.dir"
            )
    if checkpoint.init_from is not None and checkpoint.resumes():
        raise ConfigError(
            "checkpoint.resume and checkpoint.init_from both name a folder; the first takes all of "
            "a run's state from it, the second the weights alone: choose one"
        )


def _of_several_hosts() -> bool:
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
