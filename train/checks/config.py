"""All checks of the config that need no process group."""

from __future__ import annotations

import os

from train.checks.data import check_data, check_text
from train.checks.limits import check_limits
from train.checks.machine import check_engine, check_hardware, check_kv_budget
from train.checks.model import check_model
from train.checks.origin import check_origin
from train.checks.outputs import check_export, check_log, check_profile
from train.checks.training import (
    check_batch,
    check_checkpoint,
    check_compile,
    check_final,
    check_micro_batch,
    check_offload,
    check_optim,
    check_sdpa,
    check_speed_test,
)
from train.config import RUN_MODES, Config, ConfigError
from train.run.recipe_change import newest_metadata, require_recipe
from train.run.run_folder import RunFolder


def check(config: Config, world: int) -> None:
    """Raise ``ConfigError`` for the first value that cannot work with ``world`` processes.

    ``parallel.cp`` is a number, as after ``config.on(world)``.
    """
    check_limits(config)
    check_model(config.model)
    if config.mode == "export":
        check_export(config)
    if config.mode in ("generate", "export"):
        if world > 1:
            what = "text" if config.mode == "generate" else "the folder"
            raise ConfigError(
                f"mode={config.mode} under torchrun: one process writes {what}; start "
                f"python train/pretrain.py mode={config.mode} ... without torchrun"
            )
        return
    if config.mode in RUN_MODES:
        check_text(config)
    else:
        check_optim(config)
        check_data(config.data)
        check_offload(config.memory, config.model.n_layers)
        check_compile(config)
        check_hardware(config.hardware)
        if config.data.tokenizer is None:  # the run trains one with data.vocab_size tokens
            config.model.rows(config.data.vocab_size)
        check_final(config)
        check_speed_test(config)
        check_checkpoint(config)
        check_origin(config)
        check_log(config)
        check_profile(config, world)
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
    if config.mode == "verify":
        config = config.comparable()
    if config.mode not in RUN_MODES:
        check_micro_batch(config)
        check_batch(config, world // cp)
    precision, transport = config.model.attention_precision, config.parallel.transport
    if precision != "native" and cp > 1 and transport == "symmetric":
        raise ConfigError(
            f"model.attention_precision={precision} does not support "
            "parallel.transport=symmetric; nearest valid: parallel.transport=auto"
        )
    check_kv_budget(config, world)
    if config.train.attention == "sdpa":
        check_sdpa(config)
    # With several hosts, this may be a restart although this host counts its first attempt. Only
    # rank 0 knows that, and only later; the trainer then checks the folder.
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if config.mode in ("train", "check") and first and not _of_several_hosts():
        folder = RunFolder(config)
        folder.require_fit(config)
        saved = None if folder.is_replaced_by(config) else newest_metadata(folder)
        if saved is not None:
            require_recipe(config, config.batch_over(world // cp), saved)


def _of_several_hosts() -> bool:
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
