"""From Hydra's composed config to a ``Config``, and from the stored config of an old run.

The rest of the trainer uses only ``Config``, a plain dataclass that is complete and has valid
types. ``train.checks`` checks its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from train.hardware import hardware_here
from train.recipe import recipe_of
from train.sections.data import DataConfig
from train.sections.key import ConfigError, key
from train.sections.machine import ALL, EngineConfig, HardwareConfig, ParallelConfig
from train.sections.model import ModelConfig
from train.sections.modes import (
    EstimateConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    LogConfig,
    NeedleConfig,
    ProfileConfig,
    RopeSweepConfig,
    RunConfig,
    SweepConfig,
    VerifyConfig,
)
from train.sections.renamed import of_this_version
from train.sections.training import (
    CheckpointConfig,
    GuardConfig,
    MemoryConfig,
    OptimConfig,
    TrainConfig,
)

RUN_MODES = ("eval", "needle", "rope")  # evaluate a run, on any number of ranks
MODES = ("train", "check", "estimate", "verify", "generate", "export", *RUN_MODES)


@dataclass
class Config:
    """All settings of a command."""

    mode: str = key("train", choices=MODES)
    """check validates the config and starts nothing. estimate predicts memory and the time of a
    step, without a GPU. verify compares a step with parallel.cp to the same step with cp 1. The
    other modes use a checkpoint of run.dir. generate writes text. eval computes the loss of a text.
    needle runs a needle in a haystack. rope computes losses by position with other settings of
    RoPE. export writes a folder for Hugging Face's transformers"""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    run: RunConfig = field(default_factory=RunConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    estimate: EstimateConfig = field(default_factory=EstimateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    needle: NeedleConfig = field(default_factory=NeedleConfig)
    rope: RopeSweepConfig = field(default_factory=RopeSweepConfig)

    def on(self, world: int) -> Config:
        """The config with the number ``world`` of processes in place of ``parallel.cp=all``."""
        if self.parallel.cp != ALL:
            return self
        return replace(self, parallel=replace(self.parallel, cp=world))

    def comparable(self) -> Config:
        """The config of the steps of ``mode=verify``: samples of ``verify.seq_len`` tokens, and
        ``zero_init`` off.

        A CP group has one micro-batch, unless ``train.global_batch_size`` or
        ``train.gradient_accumulation_steps`` gives another number: with ``train.batch_tokens``
        shorter samples would be more samples.
        """
        seq_len, longest = self.verify.seq_len or self.data.seq_len, self.data.max_doc_len
        longest = None if longest is None else min(longest, seq_len)
        return replace(
            self,
            model=replace(self.model, zero_init=False),
            data=replace(self.data, seq_len=seq_len, max_doc_len=longest),
            train=replace(self.train, batch_tokens=None),
        )

    def samples_at_once(self) -> int:
        """Samples that a CP group shares in a micro-batch; ``parallel.cp`` must be a number."""
        if self.data.tokens_per_rank is None:
            return 1
        return max(1, self.data.tokens_per_rank * self.parallel.cp // self.data.seq_len)

    def accumulation_over(self, dp: int) -> int:
        """Micro-batches per step of each of ``dp`` CP groups."""
        train, at_once = self.train, dp * self.samples_at_once()
        if train.global_batch_size is not None:
            return max(1, train.global_batch_size // at_once)
        if train.gradient_accumulation_steps is not None or train.batch_tokens is None:
            return train.gradient_accumulation_steps or 1
        return max(1, round(train.batch_tokens / (at_once * self.data.seq_len)))

    def batch_over(self, dp: int) -> int:
        """Samples per step of ``dp`` CP groups together."""
        return self.accumulation_over(dp) * dp * self.samples_at_once()

    def same_batch(self, dp: int) -> list[str]:
        """The overrides that keep the samples of a step, whatever a micro-batch has."""
        names = []
        if self.train.global_batch_size is None:
            names.append(f"train.global_batch_size={self.batch_over(dp)}")
        if self.train.gradient_accumulation_steps not in (None, 1):
            names.append("train.gradient_accumulation_steps=null")
        return names

    def fewer_tokens(self, batch: int, dp: int) -> int | None:
        """The next smaller ``data.tokens_per_rank`` with which ``dp`` CP groups share ``batch``
        samples; None if there is none."""
        seq_len, cp = self.data.seq_len, self.parallel.cp
        for at_once in range(self.samples_at_once() - 1, 0, -1):
            if batch % (dp * at_once) == 0 and at_once * seq_len % cp == 0:
                return at_once * seq_len // cp
        return None


SOURCES = "data.sources"
NAME = "NAME"

GROUPS = ("model", "data", "optim", "engine", "memory", "hardware", "experiment")


def register_schema() -> None:
    """Register ``Config`` with Hydra as ``schema``, the first entry of ``configs/config.yaml``,
    and the default of the group ``hardware``.

    No key of ``model`` has a value there, so that ``fill_model`` finds the keys that no file sets.
    Neither have the learning rate and the batch, which ``resolve`` chooses by the model's size.
    """
    config = Config()
    for section in (config.model, config.model.rope):
        for entry in fields(section):
            if entry.name not in ("rope", "inherit"):
                setattr(section, entry.name, MISSING)
    config.optim.lr = config.train.batch_tokens = MISSING
    OmegaConf.register_new_resolver("hardware_here", hardware_here, replace=True)
    ConfigStore.instance().store(name="schema", node=config)


def fill_model(composed: DictConfig, origin: Callable[[], ModelConfig]) -> None:
    """Set the keys of ``model`` that have no value.

    With ``model.inherit`` they get the values of ``origin()``, otherwise their defaults.
    """
    missing = [key for key in OmegaConf.missing_keys(composed) if key.startswith("model.")]
    if missing:
        model = origin() if composed.model.inherit else ModelConfig()
        for key in missing:
            OmegaConf.update(composed, key, attrgetter(key.removeprefix("model."))(model))


def resolve(composed: DictConfig) -> Config:
    """Convert Hydra's composed config to a ``Config``: check types, resolve interpolations.

    With ``data.sources``, ``data.path`` may have no value and becomes None; ``mode=estimate`` reads
    no data. Learning rate and batch get the values for the model's size. Raises ``ConfigError`` for
    any other missing value.
    """
    if not any(key.startswith("model.") for key in OmegaConf.missing_keys(composed)):
        recipe = recipe_of(OmegaConf.to_object(composed.model).block_parameters())
        for section, key, value in (
            ("optim", "lr", recipe.lr),
            ("train", "batch_tokens", recipe.batch_tokens),
        ):
            if OmegaConf.is_missing(composed[section], key):
                composed[section][key] = value
    optional = composed.data.sources or composed.mode == "estimate"
    if OmegaConf.is_missing(composed.data, "path") and optional:
        composed.data.path = None
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        sources = f", or sources of text with {SOURCES}.{NAME}.path=... (NAME is yours)"
        remark = sources if missing[0] == "data.path" else ""
        raise ConfigError(f"{missing[0]} has no value yet; give it with {missing[0]}=...{remark}")
    config = OmegaConf.to_object(composed)
    if not isinstance(config, Config):
        raise TypeError(f"the composed configuration is a {type(config).__name__}, not a Config")
    return config


def from_plain(values: dict[str, Any]) -> Config:
    """A ``Config`` from nested dictionaries (parsed JSON); missing keys get their defaults.

    Settings of earlier versions are read as they were meant. Raises ``ConfigError`` for values that
    no ``Config`` can have, such as a key of a later version.
    """
    if not isinstance(values, dict):
        raise ConfigError("the sections of a config are missing")
    for name, value in values.items():
        if not isinstance(value, str if name == "mode" else dict):
            form = "a word" if name == "mode" else "a section"
            raise ConfigError(f"{name}={value} must be {form}")
    schema, values = OmegaConf.structured(Config), of_this_version(values)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema, values))
    except ConfigKeyError as error:
        raise ConfigError(f"{error.full_key} is not a key of this version") from None
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(key + str(error).splitlines()[0]) from None
    assert isinstance(config, Config)
    return config
