"""The sections of the config that one mode of the trainer reads."""

from __future__ import annotations

from dataclasses import dataclass


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
class ExportConfig:
    dir: str | None = None
    checkpoint: str | None = None
    dtype: str = "float32"
    padding: bool = False
    shard_bytes: int = 5_000_000_000
