"""The attention windows of layers, in the form that plans use.

A window of w keys, the token's own included, is (left, right) = (w - 1, -1) in a causal plan.
"""

from __future__ import annotations

from typing import Any

from train.config import ModelConfig


def window_size(window: int | None) -> tuple[int, int]:
    """The window of a plan or of ``flash_attn_func`` for a value of ``ModelConfig.window``."""
    return (-1, -1) if window is None else (window - 1, -1)


def widest(model: ModelConfig) -> tuple[int, int]:
    """The window of the widest layer, for which a plan balances the work of the ranks."""
    windows = {model.window(layer) for layer in range(model.n_layers)}
    return window_size(None if None in windows else max(windows))


def allowed_pairs(model: ModelConfig, plan: Any) -> int:
    """Sum over layers of the (query, key) pairs that are allowed for the queries of this rank."""
    windows = [model.window(layer) for layer in range(model.n_layers)]
    of_window = {w: narrowed(plan, w).work_per_rank[plan.rank] for w in set(windows)}
    return sum(of_window[window] for window in windows)


def narrowed(plan: Any, window: int | None) -> Any:
    """``plan`` with ``window``, or ``plan`` itself if its own window is narrower."""
    left, right = plan.window_size
    if window is None or 0 <= left < window:
        return plan
    return plan.with_window((window - 1, right))
