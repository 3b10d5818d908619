"""``loss.png`` and ``loss_by_position.png``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from train.json_lines import read_lines
from train.loss import bucket_label

if TYPE_CHECKING:
    from train.evaluate import Evaluation


def plot_run(folder: Path, full: Evaluation, self_only: Evaluation) -> None:
    """Draw both plots from the run's ``metrics.jsonl`` and its final evaluations.

    Raises ``ModuleNotFoundError`` without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    records = read_lines(folder / "metrics.jsonl")
    losses = [math.nan if r["loss"] is None else r["loss"] for r in records]
    axes.plot([r["step"] for r in records], losses)
    axes.set(xlabel="optimiser step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=150)

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for evaluation, label in ((full, "attention"), (self_only, "each token sees only itself")):
        axes.plot(evaluation.loss_by_bucket, marker="o", label=label)
    ticks = range(len(full.loss_by_bucket))
    axes.set_xticks(ticks, [bucket_label(bucket) for bucket in ticks], rotation=45, ha="right")
    axes.set(xlabel="position in the document (tokens)", ylabel="held-out loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss_by_position.png", dpi=150)
