"""The checks of ``engine`` and ``hardware``."""

from __future__ import annotations

from train.config import ConfigError, EngineConfig, HardwareConfig
from train.extras import installed, remedy
from train.keys import schema

# The keys of each engine. Those of other engines must be null.
ENGINES = {"ddp": (), "fsdp2": ("shard", "reduce"), "deepspeed": ("stage", "offload")}


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
