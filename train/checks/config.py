"""All checks of the config that need no process group."""

from __future__ import annotations

import os

from train.checks.batch import check_batch
from train.checks.compile import check_compile
from train.checks.data import check_data, check_text, nearest_path
from train.checks.engine import ENGINES, check_engine
from train.checks.evaluation import check_budgets, check_final, check_needle, check_rope_sweep
from train.checks.export import check_export
from train.checks.hardware import check_hardware
from train.checks.model import ROPE_TYPES, check_model
from train.checks.offload import check_offload
from train.checks.origin import check_origin
from train.config import AUTO, FORMATS, Config, ConfigError
from train.extras import installed, remedy
from train.hf.architecture import hf_folder
from train.keys import default, get, nearest, schema_keys, to_schema_key
from train.paths import expand
from train.recipe import recipe_of
from train.run.recipe_change import newest_metadata, require_recipe
from train.run.run_folder import RunFolder
from train.run.schedule import schedule_length, warmup_steps

RUN_MODES = ("eval", "needle", "rope")  # evaluate a run, on any number of ranks
CHOICES = {
    "mode": ("train", "check", "estimate", "verify", "generate", "export", *RUN_MODES),
    "model.attention_precision": ("native", "fp8", "int8"),
    "model.rope.type": tuple(ROPE_TYPES),
    "engine.name": tuple(ENGINES),
    "optim.schedule": ("cosine", "linear", "wsd"),
    "data.packing": ("stream", "best_fit"),
    "data.format": FORMATS,
    "data.special_tokens": ("text", "ids"),
    "parallel.layout": ("zigzag", "contiguous"),
    "parallel.transport": ("auto", "gloo", "nccl", "symmetric"),
    "parallel.device": ("auto", "cpu", "cuda"),
    "train.precision": ("auto", "float32", "bfloat16"),
    "train.residual": ("float32", "bfloat16"),
    "train.attention": ("ringfa3", "sdpa"),
    "train.compile": ("auto", "block", "none"),
    "memory.recompute": ("none", "full", "attention-saving"),
    "memory.offload": ("none", "residual", "all"),
    "export.dtype": ("float32", "bfloat16"),
}

MINIMUM = {
    "model.n_layers": 1,
    "model.n_heads": 1,
    "model.n_kv_heads": 1,
    "model.dim": 1,
    "model.head_dim": 2,
    "model.ffn_dim": 1,
    "model.vocab_size": 1,
    "model.rope.factor": 1,
    "model.rope.original_len": 1,
    "data.vocab_size": 257,  # 256 bytes and the token that starts a document
    "data.seq_len": 2,
    "data.piece_len": 1,
    "data.split_bytes": 4,  # a character
    "data.min_len": 1,
    "optim.embedding_lr_scale": 0,
    "optim.weight_decay": 0,
    "optim.warmup_steps": 0,
    "optim.schedule_steps": 1,
    "optim.decay_steps": 1,
    "optim.final_lr_ratio": 0,
    "parallel.cp": 1,
    "train.steps": 1,
    "train.batch": 1,
    "train.accumulation": 1,
    "train.batch_tokens": 1,
    "train.seed": 0,
    "memory.recompute_layers": 1,
    "memory.mlp_chunk": 1,
    "memory.loss_chunk": 1,
    "memory.offload_layers": 1,
    "train.eval_every": 0,
    "train.eval_bytes": 1,
    "train.final_eval_bytes": 1,
    "train.final_eval_last": 1,
    "train.final_eval_len": 2,
    "parallel.threads": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 1,
    "guard.window": 2,
    "guard.patience": 1,
    "sweep.nproc_per_node": 1,
    "generate.tokens": 1,
    "generate.samples": 1,
    "generate.temperature": 0,
    "generate.top_k": 1,
    "generate.seed": 0,
    "eval.bytes": 1,
    "verify.seq_len": 2,
    "estimate.gpus": 1,
    "estimate.gpus_per_host": 1,
    "estimate.document": 1,
    "hardware.context_gb": 0,
    "hardware.nccl_gb": 0,
    "hardware.elementwise_bytes": 0,
    "hardware.compiled_bytes": 0,
    "export.shard_bytes": 1,
    "needle.trials": 1,
    "needle.digits": 1,
    "needle.others": 0,
    "needle.hops": 1,
    "needle.seed": 0,
}

ABOVE_ZERO = (
    "model.norm_eps",
    "model.rope.theta",
    "model.rope.low_freq_factor",
    "hardware.memory_gb",
    "hardware.host_gb",
    "hardware.peak_tflops",
    "hardware.memory_gb_s",
    "hardware.link_gb_s",
    "hardware.network_gb_s",
    "hardware.host_link_gb_s",
    "model.rope.beta_slow",
    "model.rope.attention_factor",
    "optim.lr",
    "optim.eps",
    "optim.clip",
    "parallel.timeout_s",
    "checkpoint.stop_s",
    "train.max_wall_time",
    "guard.sigma",
    "generate.top_p",
)


def check(config: Config, world: int) -> None:
    """Raise ``ConfigError`` for the first value that cannot work with ``world`` processes."""
    _check_values(config)
    check_model(config.model)
    if config.generate.top_p is not None and config.generate.top_p > 1:
        raise ConfigError(
            f"generate.top_p={config.generate.top_p} exceeds 1; nearest valid: generate.top_p=1"
        )
    if config.mode == "export":
        check_export(config)
    if config.mode in ("generate", "export"):
        return
    if config.mode in RUN_MODES:
        check_text(config)
        check_needle(config.needle)
        check_rope_sweep(config)
    else:
        _check_optim(config)
        check_data(config.data)
        check_offload(config.memory, config.model.n_layers)
        check_compile(config)
        check_hardware(config.hardware)
        if config.data.tokenizer is None:  # the run trains one with data.vocab_size tokens
            config.model.rows(config.data.vocab_size)
        check_final(config)
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
    if config.mode not in RUN_MODES and config.train.batch is not None:
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


def _check_values(config: Config) -> None:
    check_budgets(config.train)
    for key, allowed in CHOICES.items():
        value = get(config, key)
        if value not in allowed:
            match = nearest(value, allowed) or allowed[0]
            raise ConfigError(
                f"{key}={value}: allowed are {', '.join(allowed)}; nearest valid: {key}={match}"
            )
    for key, least in MINIMUM.items():
        value = get(config, key)
        if value is not None and value != AUTO and value < least:
            raise ConfigError(f"{key}={value} is too small; nearest valid: {key}={least}")
    for key in ABOVE_ZERO:
        value = get(config, key)
        if value is not None and not value > 0:
            usual = default(key)
            if key == "optim.lr":  # the schema has that of the smallest models
                usual = recipe_of(config.model.block_parameters()).lr
            usual = "null" if usual is None else usual
            raise ConfigError(f"{key}={value} must be above 0; the default is {key}={usual}")


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
    optim = config.optim
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(
            f"optim.betas={optim.betas} must be two numbers in [0, 1); the default is "
            f"optim.betas={default('optim.betas')}"
        )
    steps = config.train.steps
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
    if len(wanted) != 2 or not 1 <= wanted[0] <= wanted[1] <= steps:
        last = min(5, steps)
        raise ConfigError(
            f"profile.steps={wanted} must be the first and the last step, from 1 to "
            f"train.steps={steps}; for example profile.steps=[{min(3, last)},{last}]"
        )
    absent = [rank for rank in profile.ranks if not 0 <= rank < world]
    if absent or not profile.ranks:
        raise ConfigError(
            f"profile.ranks={profile.ranks} must be ranks from 0 to {world - 1}; nearest valid: "
            f"profile.ranks=[{world - 1 if absent else 0}]"
        )


def _check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    keys = schema_keys()
    for key in checkpoint.accept_changes:
        if to_schema_key(key) not in keys:
            raise ConfigError(
                f"checkpoint.accept_changes: {key} is no key; nearest valid: "
                f"checkpoint.accept_changes=[{nearest(key, keys, cutoff=0)}]"
            )
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
