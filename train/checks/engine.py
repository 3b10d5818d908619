"""The checks of ``engine.*``: its keys, their values, and the package that it needs."""

from __future__ import annotations

import dataclasses

from train.config import ConfigError, EngineConfig
from train.extras import installed, remedy
from train.keys import nearest

# The keys of each engine with their values. The keys of other engines must be null.
ENGINES = {
    "ddp": {},
    "fsdp2": {"shard": ("all", "host"), "reduce": ("micro", "step")},
    "deepspeed": {"stage": (1, 2, 3), "offload": ("none", "optimizer", "all")},
}


def check_engine(engine: EngineConfig) -> None:
    """Raise ``ConfigError`` for the first key or value that ``engine.name`` does not have."""
    keys = ENGINES[engine.name]
    for field in dataclasses.fields(engine):
        key, value = field.name, getattr(engine, field.name)
        if key == "name":
            continue
        allowed = keys.get(key)
        if allowed is None and value is not None:
            owners = [name for name, of_engine in ENGINES.items() if key in of_engine]
            raise ConfigError(
                f"engine.{key}={value} is a key of engine={' and engine='.join(owners)}, not of "
                f"engine={engine.name}; leave it out, or choose engine={owners[0]}"
            )
        if allowed is not None and value not in allowed:
            match = _nearest_choice(value, allowed)
            raise ConfigError(
                f"engine.{key}={'null' if value is None else value}: "
                f"allowed are {', '.join(map(str, allowed))}; "
                f"nearest valid: engine.{key}={match}"
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


def _nearest_choice(value: object, allowed: tuple) -> object:
    """The most similar of ``allowed``, which are words or numbers."""
    if isinstance(allowed[0], int):
        number = value if isinstance(value, int) else allowed[0]
        return min(allowed, key=lambda choice: abs(choice - number))
    return nearest(str(value), allowed) or allowed[0]
