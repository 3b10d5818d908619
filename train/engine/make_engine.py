"""The engine that ``engine.name`` selects."""

from __future__ import annotations

from train.config import Config
from train.engine.ddp import DDPEngine
from train.engine.deepspeed import DeepSpeedEngine
from train.engine.engine import Engine
from train.engine.fsdp2 import FSDP2Engine
from train.engine.parallel import ParallelLayout


def make_engine(
    config: Config, n_tokens: int, parallel: ParallelLayout, draw: bool = True
) -> Engine:
    """The engine of ``config`` on this rank; every rank must call. ``draw`` is as in `Engine`."""
    engines = {"ddp": DDPEngine, "fsdp2": FSDP2Engine, "deepspeed": DeepSpeedEngine}
    return engines[config.engine.name](config, n_tokens, parallel, draw)
