"""The schema of ``configs/``.

Each key is documented once, above its value in ``configs/``. The rest of the trainer uses only
``Config``, a plain dataclass that is complete and has valid types. ``train.checks.config`` checks
the values, also against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from train.hardware import hardware_here
from train.recipe import recipe_of
from train.sections import (
    EstimateConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    GuardConfig,
    HardwareConfig,
    LogConfig,
    NeedleConfig,
    ProfileConfig,
    RopeSweepConfig,
    RunConfig,
    SweepConfig,
    VerifyConfig,
)


class ConfigError(ValueError):
    """A config value that cannot work. The message names the key, its value and what to do.

    ``found_by_all`` is true if every process of the host raises the error: one of them prints it.
    """

    found_by_all = True


FULL = "full"  # in model.windows: no window
NO_EOS = "none"  # as data.eos_token: no token ends a document
PLAIN, CHAT, COMPLETION = FORMATS = ("text", "chat", "completion")  # of data.format
AUTO = "auto"  # as train.eval_bytes or train.final_eval_bytes: at least these bytes; train.compile
AUTO_BYTES = {"eval_bytes": 100_000, "final_eval_bytes": 16_000_000}
# The default chunk of the loss has at most 2^26 logits, but at least 1,024 tokens: matrix products
# of fewer rows are slow.
MOST_LOGITS, LEAST_LOSS_TOKENS = 2**26, 1024


@dataclass
class RopeConfig:
    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass
class ModelConfig:
    inherit: bool = False
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    dim: int = 128
    head_dim: int | None = None
    ffn_dim: int = 384
    qk_norm: bool = True
    qkv_bias: bool = False
    tied_embeddings: bool = False
    zero_init: bool = True
    norm_eps: float = 1e-5
    attention_precision: str = "native"
    softmax_scale: float | None = None
    vocab_size: int | None = None
    windows: list[Any] | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)

    def resolved_head_dim(self) -> int:
        """``head_dim``, or ``dim / n_heads`` if it is null."""
        return self.head_dim if self.head_dim is not None else self.dim // self.n_heads

    def block_parameters(self) -> int:
        """Parameters of all blocks, without norms and biases. The values may be unchecked."""
        head_dim = self.head_dim or self.dim // max(self.n_heads, 1)
        attention = head_dim * 2 * (self.n_heads + self.n_kv_heads)
        return self.n_layers * self.dim * (attention + 3 * self.ffn_dim)

    def window(self, layer: int) -> int | None:
        """Keys that a token attends to in a layer, its own included; None for all before it."""
        if self.windows is None:
            return None
        window = self.windows[layer % len(self.windows)]
        return None if window == FULL else window

    def rows(self, n_tokens: int) -> int:
        """Rows of embedding and head for ids below ``n_tokens``.

        Raises ``ConfigError`` if ``vocab_size`` is less.
        """
        if self.vocab_size is not None and self.vocab_size < n_tokens:
            raise ConfigError(
                f"model.vocab_size={self.vocab_size} has no row for some tokens: the tokenizer's "
                f"ids go up to {n_tokens - 1}; nearest valid: model.vocab_size={n_tokens}"
            )
        return n_tokens if self.vocab_size is None else self.vocab_size


@dataclass
class SourceConfig:
    path: str = MISSING
    weight: float = 1.0
    pattern: str | None = None
    text_field: str | None = None
    format: str | None = None
    split_on: str | None = None
    split_bytes: int | None = None
    min_len: int | None = None


@dataclass
class DataConfig:
    path: str | None = MISSING
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    pattern: str = "**/*"
    text_field: str = "text"
    format: str = PLAIN
    chat_template: str | None = None
    split_on: str | None = None
    split_bytes: int | None = None
    held_out: float = 0.05
    held_out_salt: int = 0
    validation_path: str | None = None
    tokenizer: str | None = None
    vocab_size: int = 4096
    bos_token: str = "<|endoftext|>"
    eos_token: str | None = None
    special_tokens: str = "text"
    seq_len: int = 4096
    piece_len: int | None = None
    document_mask: bool = True
    min_len: int | None = None
    packing: str = "stream"
    cache_dir: str = "~/.cache/ringfa3/data"
    verify: bool = True

    def longest_document(self) -> int:
        """Tokens of the longest document in a sample: the context length of the training."""
        whole = self.seq_len if self.piece_len is None else self.piece_len
        return whole if self.document_mask else self.seq_len


@dataclass
class OptimConfig:
    lr: float = 3e-3  # of the smallest models; a config of files has that of its model's size
    embedding_lr_scale: float = 1.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: str = "cosine"
    warmup_steps: int | None = None
    schedule_steps: int | None = None
    decay_steps: int | None = None
    final_lr_ratio: float = 0.0
    clip: float | None = 1.0


@dataclass
class ParallelConfig:
    cp: int = 1
    layout: str = "zigzag"
    transport: str = "auto"
    device: str = "auto"
    timeout_s: float = 600.0
    threads: int | None = None
    numa: bool = True


@dataclass
class EngineConfig:
    name: str = "ddp"
    shard: str | None = None
    reduce: str | None = None
    stage: int | None = None
    offload: str | None = None


@dataclass
class TrainConfig:
    steps: int = 300
    batch: int | None = None
    accumulation: int | None = None
    batch_tokens: int | None = None
    precision: str = "auto"
    residual: str = "float32"
    seed: int = 0
    deterministic: bool = False
    attention: str = "ringfa3"
    compile: str = "auto"
    eval_every: int = 100
    eval_bytes: int | str | None = AUTO
    final_eval_bytes: int | str | None = AUTO
    final_eval_last: int | None = None
    final_eval_len: int | None = None
    max_wall_time: float | None = None


@dataclass
class MemoryConfig:
    recompute: str = "none"
    mlp_chunk: int | None = None
    loss_chunk: int | None = None
    offload: str = "none"
    offload_layers: int | None = None
    recompute_layers: int | None = None
    force: bool = False

    def loss_tokens(self, rows: int) -> int:
        """Tokens in a chunk of the loss, if each has ``rows`` logits."""
        if self.loss_chunk is not None:
            return self.loss_chunk
        return max(LEAST_LOSS_TOKENS, MOST_LOGITS // rows)

    def recomputed(self, n_layers: int) -> int:
        """How many of ``n_layers`` layers the backward recomputes: the first ones."""
        if self.recompute == "none":
            return 0
        return n_layers if self.recompute_layers is None else self.recompute_layers

    def offloaded(self, n_layers: int) -> int:
        """How many of ``n_layers`` layers offload their tensors: the first of those that recompute.

        The last of those does not: its backward fetches the tensors of the one before it.
        """
        if self.offload == "none":
            return 0
        last = self.recomputed(n_layers) - 1
        return last if self.offload_layers is None else self.offload_layers


@dataclass
class CheckpointConfig:
    every: int = 100
    keep: int = 2
    keep_every: int | None = None
    resume: str = "auto"
    init_from: str | None = None
    reset_data: bool = False
    accept_changes: list[str] = field(default_factory=list)
    stop_s: float = 12.0

    def resumes(self) -> bool:
        """Whether ``resume`` is the path of another run or checkpoint."""
        return self.resume not in ("auto", "never")


@dataclass
class Config:
    mode: str = "train"
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

    def accumulation_over(self, dp: int) -> int:
        """Samples per step of each of ``dp`` data-parallel ranks."""
        train = self.train
        if train.batch is not None:
            return train.batch // dp
        if train.accumulation is not None or train.batch_tokens is None:
            return train.accumulation or 1
        return max(1, round(train.batch_tokens / (dp * self.data.seq_len)))


SOURCES = "data.sources"
NAME = "NAME"

GROUPS = ("model", "data", "optim", "engine", "memory", "hardware", "experiment")

# Keys of earlier versions. The command line rejects them and names the new key; old runs may use
# them.
RENAMED = {"train.recompute": "memory.recompute", "train.loss_chunk": "memory.loss_chunk"}


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

    Keys of earlier versions get their new names. A RoPE factor without a type means Llama 3's type,
    the only one of earlier versions. Data without ``eos_token`` means documents without one, and a
    run without ``train.compile`` uncompiled blocks. Raises ``ConfigError`` for values that no
    ``Config`` can have, such as a key of a later version.
    """
    if not isinstance(values, dict):
        raise ConfigError("the sections of a config are missing")
    for key, value in values.items():
        if not isinstance(value, str if key == "mode" else dict):
            raise ConfigError(f"{key}={value} must be {'a word' if key == 'mode' else 'a section'}")
    for old, new in RENAMED.items():
        (section, key), (present, name) = old.split("."), new.split(".")
        if key in values.get(section, {}):
            kept = {k: value for k, value in values[section].items() if k != key}
            moved = values.get(present, {}) | {name: values[section][key]}
            values = values | {section: kept, present: moved}
    if "train" in values:
        values = values | {"train": {"compile": "none"} | values["train"]}
    if "data" in values:
        values = values | {"data": {"eos_token": NO_EOS} | values["data"]}
    rope = values.get("model", {}).get("rope")
    if isinstance(rope, dict) and rope.get("factor", 1.0) != 1.0 and "type" not in rope:
        values = values | {"model": values["model"] | {"rope": rope | {"type": "llama3"}}}
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))
    except ConfigKeyError as error:
        raise ConfigError(f"{error.full_key} is not a key of this version") from None
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(key + str(error).splitlines()[0]) from None
    assert isinstance(config, Config)
    return config
