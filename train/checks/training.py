"""The checks of ``optim``, ``train``, ``memory`` and ``checkpoint``, with keys that limit them."""

from __future__ import annotations

import math

from train.checks.data import nearest_path
from train.compile_choice import obstacle
from train.config import RUN_MODES, Config, ConfigError, MemoryConfig
from train.hf.architecture import hf_folder
from train.keys import get, nearest, schema_keys, shown, to_schema_key
from train.paths import expand
from train.run.run_folder import RunFolder
from train.run.schedule import schedule_length, warmup_steps
from train.sections.renamed import RENAMED


def check_optim(config: Config) -> None:
    """Raise ``ConfigError`` for a schedule that does not fit the steps or the warm-up."""
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


def check_micro_batch(config: Config) -> None:
    """Raise ``ConfigError`` if ``data.tokens_per_rank`` gives a CP group no whole samples."""
    tokens, cp, seq_len = config.data.tokens_per_rank, config.parallel.cp, config.data.seq_len
    key = "verify.seq_len" if config.mode == "verify" else "data.seq_len"
    if tokens is None or tokens * cp % seq_len == 0:
        return
    least = seq_len // math.gcd(seq_len, cp)  # of a rank, if the group shares whole samples
    best = max(round(tokens / least), 1) * least
    instead = f" (or {key}={tokens * cp})" if tokens * cp < seq_len else ""
    raise ConfigError(
        f"data.tokens_per_rank={tokens} gives the {cp} ranks of a CP group {tokens * cp} tokens, "
        f"which are no whole samples of {key}={seq_len}; nearest valid: "
        f"data.tokens_per_rank={best}{instead}"
    )


def check_batch(config: Config, dp: int) -> None:
    """Raise ``ConfigError`` if ``dp`` CP groups cannot share the global batch."""
    train, at_once = config.train, config.samples_at_once()
    batch, steps = train.global_batch_size, train.gradient_accumulation_steps
    if batch is None:
        return
    if steps not in (None, 1):
        raise ConfigError(
            f"train.global_batch_size={batch} and train.gradient_accumulation_steps={steps} both "
            "set the samples of a step; nearest valid: train.gradient_accumulation_steps=1"
        )
    if batch % (dp * at_once):
        best = max(round(batch / (dp * at_once)), 1) * dp * at_once
        of, fewer = f"{dp} data-parallel ranks", ""
        if at_once > 1:
            tokens, less = config.data.tokens_per_rank, config.fewer_tokens(batch, dp)
            of = f"{dp * at_once} samples that data.tokens_per_rank={tokens} puts in a micro-batch"
            fewer = "" if less is None else f" (or data.tokens_per_rank={less})"
        raise ConfigError(
            f"train.global_batch_size={batch} is not a multiple of the {of}; "
            f"nearest valid: train.global_batch_size={best}{fewer}"
        )


def check_final(config: Config) -> None:
    """Raise ``ConfigError`` if the final evaluation needs more tokens than are read at once."""
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


def check_speed_test(config: Config) -> None:
    """Raise ``ConfigError`` for keys under which ``train.speed_test`` measures other work too."""
    if not config.train.speed_test:
        return
    for key, least, value in (
        ("train.steps", 2, config.train.steps),
        ("train.eval_every", 0, config.train.eval_every),
        ("checkpoint.every", 0, config.checkpoint.every),
    ):
        if value != least and (value < least or least == 0):
            raise ConfigError(
                f"{key}={value}: train.speed_test=true measures steps after the first, and neither "
                f"evaluates nor saves; nearest valid: {key}={least}"
            )


def check_sdpa(config: Config) -> None:
    """Raise ``ConfigError`` for the first key that ``train.attention=sdpa`` does not support."""
    if config.parallel.cp > 1:
        raise ConfigError(
            f"train.attention=sdpa needs a whole sample in each process, and parallel.cp="
            f"{config.parallel.cp} splits it; nearest valid: parallel.cp=1 (or "
            f"train.attention=ringfa3)"
        )
    saves = config.mode not in RUN_MODES and config.memory.recompute == "attention-saving"
    for key, refused, valid in (
        ("model.attention_precision", config.model.attention_precision != "native", "native"),
        ("model.windows", config.model.windows is not None, None),
        ("memory.recompute", saves, "full"),
    ):
        if refused:
            raise ConfigError(
                f"train.attention=sdpa does not support {key}={shown(get(config, key))}; nearest "
                f"valid: {key}={shown(valid)} (or train.attention=ringfa3)"
            )


def check_compile(config: Config) -> None:
    """Raise ``ConfigError`` if the blocks of ``config`` must be compiled, and cannot be."""
    problem, remedy = obstacle(config)
    if config.train.compile == "block" and problem:
        raise ConfigError(
            f"train.compile=block: {problem}; nearest valid: train.compile=auto (or {remedy})"
        )


def check_offload(memory: MemoryConfig, n_layers: int) -> None:
    """Raise ``ConfigError`` if a model of ``n_layers`` layers cannot offload with ``memory``."""
    key = f"memory.offload={memory.offload}"
    layers, recomputed = memory.recompute_layers, memory.recomputed(n_layers)
    if layers is not None and memory.recompute == "none":
        raise ConfigError(
            f"memory.recompute_layers={layers} needs memory.recompute; nearest valid: "
            "memory.recompute=attention-saving (or memory.recompute_layers=null)"
        )
    if layers is not None and layers > n_layers:
        raise ConfigError(
            f"memory.recompute_layers={layers} exceeds model.n_layers={n_layers}; nearest valid: "
            f"memory.recompute_layers={n_layers}"
        )
    if memory.offload == "none" and memory.offload_layers is not None:
        raise ConfigError(
            f"memory.offload_layers={memory.offload_layers} needs memory.offload; nearest valid: "
            "memory.offload=residual (or memory.offload_layers=null)"
        )
    if memory.offload != "none" and memory.recompute == "none":
        raise ConfigError(
            f"{key} moves what a recomputing backward keeps, and memory.recompute=none keeps every "
            "activation; nearest valid: memory.recompute=attention-saving"
        )
    if memory.offload == "all" and memory.recompute == "full":
        raise ConfigError(
            f"{key} moves outputs of attention, which memory.recompute=full computes again; "
            "nearest valid: memory.recompute=attention-saving (or memory.offload=residual)"
        )
    if memory.offload != "none" and not 1 <= memory.offloaded(n_layers) < recomputed:
        advice = (
            f"memory.offload_layers={recomputed - 1}" if recomputed > 1 else "memory.offload=none"
        )
        raise ConfigError(
            f"{key} with memory.offload_layers={memory.offload_layers}: of the {recomputed} layers "
            f"that recompute, the last stays on the device; nearest valid: {advice}"
        )


def check_checkpoint(config: Config) -> None:
    """Raise ``ConfigError`` for the first key of ``checkpoint`` that cannot work."""
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
