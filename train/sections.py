"""Sections of the config that only one mode or one package reads; ``config`` has the others."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GuardConfig:
    sigma: float | None = None
    window: int = 128
    patience: int = 10


@dataclass
class RunConfig:
    name: str = "default"
    dir: str = "runs/${run.name}"
    overwrite: bool = False


@dataclass
class LogConfig:
    wandb: bool = False
    wandb_project: str = "ringfa3"


@dataclass
class ProfileConfig:
    steps: list[int] | None = None
    ranks: list[int] = field(default_factory=lambda: [0])
    memory: bool = False


@dataclass
class SweepConfig:
    dir: str = "runs/${run.name}-sweep"
    nproc_per_node: int | None = None


@dataclass
class GenerateConfig:
    checkpoint: str | None = None
    prompt: str = ""
    tokens: int = 200
    samples: int = 1
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass
class EvalConfig:
    checkpoint: str | None = None
    path: str | None = None
    name: str | None = None
    bytes: int | None = None


@dataclass
class VerifyConfig:
    seq_len: int | None = None


@dataclass
class HardwareConfig:
    name: str = "h200"
    memory_gb: float = 150.7
    host_gb: float | None = None
    context_gb: float = 0.9
    nccl_gb: float = 2.1
    peak_tflops: float = 989.0
    head_dims: list[int] = field(default_factory=lambda: [64, 128])
    forward_tflops: list[float] = field(default_factory=lambda: [600.0, 743.0])
    backward_tflops: list[float] = field(default_factory=lambda: [585.0, 625.0])
    widths: list[int] = field(default_factory=lambda: [768, 2048, 4096])
    matmul_tflops: list[float] = field(default_factory=lambda: [610.0, 665.0, 720.0])
    elementwise_bytes: float = 780.0
    compiled_bytes: float = 300.0
    memory_gb_s: float = 4300.0
    link_gb_s: float = 248.0
    network_gb_s: float = 50.0
    host_link_gb_s: float = 50.0


@dataclass
class EstimateConfig:
    gpus: int | None = None
    gpus_per_host: int = 8
    document: int | None = None


@dataclass
class ExportConfig:
    dir: str | None = None
    checkpoint: str | None = None
    dtype: str = "float32"
    padding: bool = False
    shard_bytes: int = 5_000_000_000


@dataclass
class NeedleConfig:
    checkpoint: str | None = None
    tasks: list[str] = field(default_factory=lambda: ["single", "multi_key", "variable"])
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    trials: int = 4
    digits: int = 5
    others: int = 3
    hops: int = 2
    seed: int = 0


@dataclass
class RopeSweepConfig:
    checkpoint: str | None = None
    types: list[str] = field(default_factory=lambda: ["linear", "yarn"])
    factors: list[float] = field(default_factory=lambda: [2.0, 4.0])
    thetas: list[float] = field(default_factory=list)
