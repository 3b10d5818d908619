"""The checks of ``engine``, ``hardware`` and ``parallel.kv_budget``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ringfa3.planning.placement.hosts import hosts_of_job
from train.config import Config, ConfigError, EngineConfig, HardwareConfig
from train.extras import installed, remedy
from train.keys import schema

# The keys of each engine. Those of other engines must be null.
ENGINES = {"ddp": (), "fsdp2": ("shard", "reduce"), "deepspeed": ("stage", "offload")}

# Blocks of a rank's rows that a ring holds at least: two that arrive and one that leaves, or as
# many that ranks of other hosts land, too.
BLOCKS, BLOCKS_OF_TWO_LEVELS = 3, 7


def check_engine(engine: EngineConfig) -> None:
    """Raise ``ConfigError`` for the first key that ``engine.name`` does not have, or lacks."""
    for name, keys in ENGINES.items():
        for key in keys:
            value = getattr(engine, key)
            if name == engine.name and value is None:
                first = schema()[f"engine.{key}"].limits.choices[0]
                raise ConfigError(
                    f"engine.{key}=null: engine={name} needs a value; nearest valid: "
                    f"engine.{key}={first}"
                )
            if name != engine.name and value is not None:
                raise ConfigError(
                    f"engine.{key}={value} is a key of engine={name}, not of "
                    f"engine={engine.name}; leave it out, or choose engine={name}"
                )
    if engine.name != "deepspeed":
        return
    if engine.offload == "all" and engine.stage < 3:
        raise ConfigError(
            f"engine.offload=all moves weights that engine.stage={engine.stage} does not shard; "
            f"nearest valid: engine.offload=optimizer (or engine.stage=3)"
        )
    if not installed("deepspeed"):
        raise ConfigError(
            "engine=deepspeed: the package deepspeed is not installed; "
            f"{remedy('deepspeed')} (or engine=fsdp2)"
        )


def check_kv_budget(config: Config, world: int) -> None:
    """Raise ``ConfigError`` unless a CP group of several ranks can train with
    ``parallel.kv_budget``, whatever the lengths of documents.
    """
    budget, precision = config.parallel.kv_budget, config.model.attention_precision
    if budget is None or config.parallel.cp == 1:
        return
    if precision != "native":
        raise ConfigError(
            f"parallel.kv_budget={budget} with model.attention_precision={precision}: buffers of "
            "8 bits have no budget; nearest valid: parallel.kv_budget=null"
        )
    hosts, cp = hosts_of_job(world) or (0,) * world, config.parallel.cp
    blocks = max(_blocks(hosts[first : first + cp]) for first in range(0, world, cp))
    rows = blocks * -(-config.samples_at_once() * config.data.seq_len // config.parallel.cp)
    if budget < rows:
        raise ConfigError(
            f"parallel.kv_budget={budget}: long documents need {blocks} times the rows of a rank; "
            f"nearest valid: parallel.kv_budget={rows}"
        )


def _blocks(hosts: Sequence[int]) -> int:
    """Blocks of a rank's rows that a ring over ranks on these hosts needs for any documents.

    Where a host has more ranks than another, a rank of the other lands rows of several of them.
    """
    ranks = Counter(hosts).values()
    if len(ranks) == 1 or max(ranks) == 1:
        return BLOCKS
    return BLOCKS_OF_TWO_LEVELS * -(-max(ranks) // min(ranks))


def check_hardware(hardware: HardwareConfig) -> None:
    """Raise ``ConfigError`` unless each list of ``hardware`` has a speed for each of its keys."""
    for keys, names in (
        ("head_dims", ("forward_tflops", "backward_tflops")),
        ("widths", ("matmul_tflops",)),
    ):
        given = getattr(hardware, keys)
        for name in names:
            values = getattr(hardware, name)
            if len(values) != len(given):
                raise ConfigError(
                    f"hardware.{name}={values} must have a speed for each of "
                    f"hardware.{keys}={given}"
                )
        if given != sorted(given):
            raise ConfigError(
                f"hardware.{keys}={given} must rise; nearest valid: hardware.{keys}={sorted(given)}"
            )
