"""Plots of a run, of a sweep and of an evaluated text.

Without matplotlib every plot raises ``ModuleNotFoundError``, which ``draw`` reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from train.data.position_buckets import bucket_label
from train.extras import remedy
from train.log.json_lines import read_lines
from train.log.smoothing import smoothed, window_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(plot: Callable[[], None], console: Console) -> None:
    """Call ``plot``, or print a line that names the missing package and its extra."""
    try:
        plot()
    except ModuleNotFoundError as error:
        line = f"no plot: {error}; {remedy('plots')}"
        console.print(line, soft_wrap=True, markup=False)  # the brackets are not rich markup


def plot_run(
    folder: Path, full: list[float], self_only: list[float], baselines: dict[str, float]
) -> None:
    """Draw ``loss.png``, and ``loss_by_position.png`` from two evaluations' losses by bucket.

    ``loss.png`` shows the training loss of each step, its mean around each step, all validations,
    and the lowest of the ``baselines``, in nats per byte.
    """
    figure, axes = _axes()
    records, validations = (read_lines(folder / f"{name}.jsonl") for name in ("metrics", "eval"))
    steps, losses = ([r.get(key) for r in records] for key in ("step", "nats_per_byte"))
    raw = [math.nan if loss is None else loss for loss in losses]
    axes.plot(steps, raw, color="C0", alpha=0.25, linewidth=0.8)
    window = window_of(len(steps))
    axes.plot(steps, smoothed(losses, window), color="C0", label=f"train, mean of {window} steps")
    held_out = [math.nan if r["nats_per_byte"] is None else r["nats_per_byte"] for r in validations]
    axes.plot([r["step"] for r in validations], held_out, color="C1", marker="o", label="held out")
    strongest = min(baselines, key=lambda name: baselines[name])
    label = f"{strongest}, held out"
    axes.axhline(baselines[strongest], color="0.4", linestyle="--", label=label)
    axes.set(xlabel="optimiser step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=150)

    figure, axes = _axes()
    _draw_by_position(axes, {"attention": full, "current token only": self_only})
    axes.set(ylabel="held-out loss (nats per token)")
    figure.savefig(folder / "loss_by_position.png", dpi=150)


def plot_losses(path: Path, loss_by_bucket: dict[str, list[float]]) -> None:
    """Plot losses by position, a labelled curve each."""
    figure, axes = _axes()
    _draw_by_position(axes, loss_by_bucket)
    axes.set(ylabel="loss (nats per token)")
    figure.savefig(path, dpi=150)


def plot_needle(path: Path, cells: list[dict[str, Any]]) -> None:
    """Draw each task's share of matches by length and depth, from the cells of needle.json."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    figure = Figure(figsize=(1 + 4 * len(tasks), 4), layout="constrained")
    image = None
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        shares = [[math.nan] * len(lengths) for _ in depths]
        for cell in (cell for cell in cells if cell["task"] == task):
            row, column = depths.index(cell["depth"]), lengths.index(cell["length"])
            shares[row][column] = cell["matches"] / cell["trials"]
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes.set(title=task, xlabel="tokens", ylabel="depth of the fact")
    figure.colorbar(image, ax=figure.axes, label="share of exact matches")
    figure.savefig(path, dpi=150)


def plot_sweep(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Draw ``sweep.png`` from the rows of ``sweep.json``, if any number differs between them."""
    across, lines = sweep_lines(rows)
    if across is None:
        return
    figure, axes = _axes()
    for label, points in sorted(lines.items()):
        axes.plot(*zip(*points, strict=True), marker="o", label=label or None)
    values = [x for points in lines.values() for x, _ in points]
    if min(values) > 0 and max(values) >= 10 * min(values):
        axes.set_xscale("log")
    axes.set(xlabel=across, ylabel="held out (nats per byte)")
    if 1 < len(lines) <= 10:
        axes.legend()
    figure.savefig(folder / "sweep.png", dpi=150)


def sweep_lines(
    rows: list[dict[str, Any]],
) -> tuple[str | None, dict[str, list[tuple[float, float]]]]:
    """The key for the x axis and, by label, one sorted line of (x, result) points of finished jobs.

    The key is the numeric choice with most values; a seed only if there is no other. Each
    combination of the other choices gives a line.
    """
    finished = [row for row in rows if row["status"] == "finished"]
    values: dict[str, set[float]] = {}
    for key in {key for row in finished for key in row["choices"]}:
        numbers = [_number(row["choices"].get(key)) for row in finished]
        if None not in numbers and len(set(numbers)) > 1:
            values[key] = {number for number in numbers if number is not None}
    if not values:
        return None, {}
    across = max(sorted(values), key=lambda key: (not key.endswith("seed"), len(values[key])))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in finished:
        others = {key: value for key, value in row["choices"].items() if key != across}
        label = " ".join(f"{key}={value}" for key, value in others.items())
        lines.setdefault(label, []).append((float(row["choices"][across]), row["nats_per_byte"]))
    return across, {label: sorted(points) for label, points in lines.items()}


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _axes() -> tuple[Figure, Axes]:
    """An empty figure without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _draw_by_position(axes: Axes, curves: dict[str, list[float]]) -> None:
    for label, loss_by_bucket in curves.items():
        axes.plot(loss_by_bucket, marker="o", label=label)
    ticks = range(max(len(loss_by_bucket) for loss_by_bucket in curves.values()))
    axes.set_xticks(ticks, [bucket_label(bucket) for bucket in ticks], rotation=45, ha="right")
    axes.set(xlabel="position in the document (tokens)")
    axes.legend()
