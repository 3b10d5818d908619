"""Plots of a run, of its speed, of a sweep and of an evaluated text.

Without matplotlib every plot raises ``ModuleNotFoundError``, which ``draw`` reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from train.console import LineConsole
from train.data.position_buckets import bucket_label
from train.engine.time_split import CATEGORIES
from train.extras import remedy
from train.log.json_lines import read_lines
from train.log.smoothing import smoothed, window_of
from train.log.units import bits, loss_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(plot: Callable[[], None], console: LineConsole) -> None:
    """Call ``plot``, or print a line that names the missing package and its extra."""
    try:
        plot()
    except ModuleNotFoundError as error:
        line = f"no plot: {error}; {remedy('plots')}"
        console.print(line)


def plot_run(
    folder: Path,
    full: list[float],
    self_only: list[float],
    baselines: dict[str, float],
    bytes_per_token: float,
) -> None:
    """Draw ``loss.png``, and ``loss_by_position.png`` from two evaluations' losses by bucket.

    ``loss.png`` shows the loss of each training step and its mean around each step, all
    validations, and the lowest of the ``baselines`` (in nats per byte); below it the learning rate
    and the gradient norm. Losses are in nats per token. ``bytes_per_token`` of the held-out text
    gives the scale of bits per byte on the right.
    """
    figure = _figure(height=7)
    losses, rates, norms = figure.subplots(3, sharex=True, height_ratios=[3, 1, 1])
    records, validations = (read_lines(folder / f"{name}.jsonl") for name in ("metrics", "eval"))
    steps, window = [record["step"] for record in records], window_of(len(records))
    _draw_smoothed(losses, steps, [loss_of(record) for record in records], window)
    at, held_out = [r["step"] for r in validations], [loss_of(r) for r in validations]
    losses.plot(at, held_out, color="C1", marker="o", label="held out")
    strongest = min(baselines, key=lambda name: baselines[name])
    level = baselines[strongest] * bytes_per_token
    losses.axhline(level, color="0.4", linestyle="--", label=f"{strongest}, held out")
    losses.set(title=f"Training of {folder.name}", ylabel="loss (nats per token)")
    scale = bits(1 / bytes_per_token)
    right = losses.secondary_yaxis("right", functions=(lambda y: y * scale, lambda y: y / scale))
    right.set_ylabel("bits per byte of the held-out text")
    rates.plot(steps, [record.get("lr") or math.nan for record in records], color="C2")
    rates.set(ylabel="learning rate", yscale="log")
    _draw_smoothed(norms, steps, [record.get("grad_norm") for record in records], window)
    norms.set(xlabel="optimiser step", ylabel="gradient norm", yscale="log")
    losses.legend()
    for axes in (losses, rates, norms):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=150)
    by_position = {"attention": full, "current token only": self_only}
    title = f"Held-out loss of {folder.name} by position"
    plot_losses(folder / "loss_by_position.png", title, by_position)


def _draw_smoothed(axes: Axes, steps: list[int], values: list[float | None], window: int) -> None:
    axes.plot(steps, np.array(values, float), color="C0", alpha=0.25, linewidth=0.8)
    label = f"train, mean of {window} steps"
    axes.plot(steps, smoothed(values, window), color="C0", label=label)


def plot_losses(path: Path, title: str, loss_by_bucket: dict[str, list[float]]) -> None:
    """Plot losses by position, a labelled curve each, in nats per token."""
    figure = _figure()
    axes = figure.subplots()
    for label, losses in loss_by_bucket.items():
        axes.plot(losses, marker="o", label=label)
    ticks = range(max(map(len, loss_by_bucket.values())))
    axes.set_xticks(ticks, [bucket_label(bucket) for bucket in ticks], rotation=45, ha="right")
    axes.set(
        title=title, xlabel="position in the document (tokens)", ylabel="loss (nats per token)"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def plot_speed(path: Path, found: dict[str, Any]) -> None:
    """Draw the parts of a step's seconds and the device memory of ``speed.json``, also predicted.

    Steps of CPUs have no parts.
    """
    figure = _figure(width=9, height=2.6)
    seconds, memory = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    for side, figures in {"measured": found, "predicted": found.get("predicted", {})}.items():
        left, total = 0.0, figures.get("seconds", 0.0)
        for n, part in enumerate(CATEGORIES):
            length = figures.get(f"{part}_s", 0.0)
            seconds.barh(side, length, left=left, color=f"C{n}", label=part)
            left += length
        seconds.barh(side, total - left, left=left, color="0.8", label="not split")
        gigabytes = figures.get("device_memory", 0) / 1e9
        memory.barh(side, gigabytes, color="0.5")
        for axes, value in ((seconds, total), (memory, gigabytes)):
            axes.text(value, side, f" {value:.4g}", va="center")
    seconds.set(title=f"A step of {path.parent.name}", xlabel="seconds")
    memory.set(title="Device memory", xlabel="GB")
    for axes in (seconds, memory):
        axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    seconds.invert_yaxis()
    handles, labels = seconds.get_legend_handles_labels()
    parts = len(CATEGORIES) + 1
    figure.legend(handles[:parts], labels[:parts], loc="outside lower center", ncol=parts)
    figure.savefig(path, dpi=150)


def plot_needle(path: Path, cells: list[dict[str, Any]]) -> None:
    """Draw each task's share of matches by length and depth, from the cells of needle.json."""
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    figure = _figure(width=1 + 4 * len(tasks))
    figure.suptitle("Needles found, of all trials")
    image = None
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        shares = [[math.nan] * len(lengths) for _ in depths]
        for cell in (cell for cell in cells if cell["task"] == task):
            row, column = depths.index(cell["depth"]), lengths.index(cell["length"])
            shares[row][column] = share = cell["matches"] / cell["trials"]
            text, color = f"{cell['matches']}/{cell['trials']}", "black" if share > 0.5 else "white"
            axes.text(column, row, text, color=color, ha="center", va="center")
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes.set(title=task, xlabel="tokens", ylabel="depth of the needle")
    figure.colorbar(image, ax=figure.axes, label="share of exact matches")
    figure.savefig(path, dpi=150)


def plot_sweep(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Draw ``sweep.png`` from the rows of ``sweep.json``, if any number differs between them."""
    across, lines = sweep_lines(rows)
    if across is None:
        return
    figure = _figure()
    axes = figure.subplots()
    for label, points in sorted(lines.items()):
        values, results = zip(*points, strict=True)
        axes.plot(values, [bits(nats) for nats in results], marker="o", label=label or None)
    values = [x for points in lines.values() for x, _ in points]
    is_rate = across.endswith("lr")
    if min(values) > 0 and (is_rate or max(values) >= 10 * min(values)):
        axes.set_xscale("log")
    title = f"Held-out loss of {folder.name}"
    axes.set(title=title, xlabel=across, ylabel="loss (bits per byte)")
    axes.grid(alpha=0.3)
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


def _figure(width: float = 7, height: float = 4) -> Figure:
    """An empty figure without a display; sizes are in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
