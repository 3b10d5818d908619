"""The checks of the keys ``model.*`` against each other."""

from __future__ import annotations

import dataclasses

from train.config import ConfigError, ModelConfig
from train.keys import default, shown
from train.sections.model import FULL, ROPE_TYPES, RopeConfig

# A copy of a constant of ringfa3, because importing ringfa3 would import torch.
QUANTISED_HEAD_DIMS = (64, 128, 256)


def check_model(model: ModelConfig) -> None:
    """Raise ``ConfigError`` for the first key of ``model`` that contradicts another."""

    def fits(n_heads: int) -> bool:
        even = model.head_dim is not None or model.dim % (2 * n_heads) == 0
        return even and n_heads % model.n_kv_heads == 0

    if model.n_heads % model.n_kv_heads or not fits(model.n_heads):
        allowed = [n for n in range(1, max(model.dim, 2 * model.n_heads) + 1) if fits(n)]
        best = min(allowed, key=lambda n: abs(n - model.n_heads), default=None)
        nearest_valid = f"; nearest valid: model.n_heads={best}" if best else ""
        raise ConfigError(
            f"model.n_heads={model.n_heads} must be a multiple of "
            f"model.n_kv_heads={model.n_kv_heads} and, where model.head_dim is null, split "
            f"model.dim={model.dim} into heads of even width{nearest_valid}"
        )
    if model.head_dim is not None and model.head_dim % 2:
        raise ConfigError(
            f"model.head_dim={model.head_dim} must be even (RoPE rotates pairs); "
            f"nearest valid: model.head_dim={model.head_dim + 1}"
        )
    width = model.resolved_head_dim()
    if model.attention_precision != "native" and width not in QUANTISED_HEAD_DIMS:
        best = min(QUANTISED_HEAD_DIMS, key=lambda n: abs(n - width))
        raise ConfigError(
            f"model.attention_precision={model.attention_precision} does not support head dim "
            f"{width}; nearest valid: model.head_dim={best}"
        )
    _check_windows(model)
    _check_rope(model.rope)


def _check_windows(model: ModelConfig) -> None:
    windows = model.windows
    if windows is None:
        return
    if not 1 <= len(windows) <= model.n_layers:
        raise ConfigError(
            f"model.windows={shown(windows)} must have 1 to model.n_layers={model.n_layers} "
            f"entries; nearest valid: model.windows={shown(windows[: model.n_layers] or [FULL])}"
        )


def _check_rope(rope: RopeConfig) -> None:
    of_type, usual = ROPE_TYPES[rope.type], RopeConfig()
    for field in dataclasses.fields(rope):
        key, value = field.name, getattr(rope, field.name)
        if key in ("type", "theta", *of_type) or value == getattr(usual, key):
            continue
        owners = [name for name, keys in ROPE_TYPES.items() if key in keys]
        best = "llama3" if "llama3" in owners else owners[0]
        raise ConfigError(
            f"model.rope.{key}={value} is a key of model.rope.type={' and '.join(owners)}, not of "
            f"model.rope.type={rope.type}; nearest valid: model.rope.type={best}"
        )
    pairs = {"low_freq_factor": "high_freq_factor", "beta_slow": "beta_fast"}
    for key, other in pairs.items():
        low, high = getattr(rope, key), getattr(rope, other)
        if low >= high:
            raise ConfigError(
                f"model.rope.{key}={low} must be below model.rope.{other}={high}; the defaults are "
                f"{default(f'model.rope.{key}')} and {default(f'model.rope.{other}')}"
            )
    if rope.type == "yarn" and rope.theta <= 1:
        raise ConfigError(f"model.rope.theta={rope.theta} must be above 1 for model.rope.type=yarn")
