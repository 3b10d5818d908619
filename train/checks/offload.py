"""The checks of ``memory.offload`` and ``memory.recompute_layers`` against ``memory.*``."""

from __future__ import annotations

from train.config import ConfigError, MemoryConfig


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
