"""Windows of layers, as the windows of plans.

A window of w keys, the token's own included, is (w - 1, -1) in a causal plan: left and right.
"""

from __future__ import annotations

from typing import Any

from train.config import ModelConfig


def window_size(window: int | None) -> tuple[int, int]:
    """The window of a plan or of ``flash_attn_func`` for a value of ``ModelConfig.window``."""
    return (-1, -1) if window is None else (window - 1, -1)


def widest(model: ModelConfig) -> tuple[int, int]:
    """The window by whose work the tokens of a sample are placed: that of the widest layer."""
    windows = {model.window(layer) for layer in range(model.n_layers)}
    return window_size(None if None in windows else max(windows))


def allowed_pairs(model: ModelConfig, plan: Any) -> int:
    """(query, key) pairs that the layers allow for the queries of the plan's rank, all together."""
    windows = [model.window(layer) for layer in range(model.n_layers)]
    of_window = {w: narrowed(plan, w).work_per_rank[plan.rank] for w in set(windows)}
    return sum(of_window[window] for window in windows)


def narrowed(plan: Any, window: int | None) -> Any:
    """``plan`` with the same tokens under ``window``, or ``plan`` itself if it is narrower."""
    left, right = plan.window_size
    if window is None or 0 <= left < window:
        return plan
    return plan.with_window((window - 1, right))
