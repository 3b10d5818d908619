"""Results as bars, in the style of FlashAttention-3's Figure 5. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringfa3.bench.common.implementations import FA3
from ringfa3.bench.common.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinguishable with any colour vision, and in grey.
COLOURS = ("#0072B2", "#E69F00", "#999999", "#56B4E9", "#CC79A7", "#009E73", "#D55E00", "#F0E442")
STOP_LABELS = {"out of memory": "OOM", "refused": "n/a", "wrong": "wrong", "failed": "failed"}


@dataclass(frozen=True)
class Series:
    """The bars of one colour: an implementation, and the row of its figure in each group."""

    name: str
    label: str
    colour: str
    hatch: str
    rows: list[Row | None]


@dataclass(frozen=True)
class Panel:
    """Groups of bars under one title."""

    title: str
    groups: list[str]
    series: list[Series]
    axis: str


Grid = list[list[Panel]]  # lines of panels
Figures = Callable[[list[Row]], Iterator[tuple[str, Grid]]]  # of one direction: (name, panels)


def draw(results: Results, folder: Path, figures: Figures) -> list[Path]:
    """Write `DIRECTION-NAME.png` for every direction and every figure of it."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    for direction in dict.fromkeys(row.direction for row in results.rows):
        rows = [row for row in results.rows if row.direction == direction]
        for name, grid in figures(rows):
            title = f"{results.benchmark.capitalize()} {direction}, {rows[0].dtype}"
            drawn.append(folder / f"{direction}-{name}.png")
            _figure(grid, title, results).savefig(drawn[-1], dpi=160)
    return drawn


def heads_label(row: Row) -> str:
    shared = "" if row.heads == row.kv_heads else f" on {row.kv_heads} KV heads"
    return f"{row.heads} heads{shared}"


def _figure(grid: Grid, title: str, results: Results) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    across = len(grid[0])
    width = {1: 9.0, 2: 11.0}.get(across, 5.0 * across)
    figure = Figure(
        figsize=(width, 0.9 + 3.4 * len(grid)),
        layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08),
    )
    every = figure.subplots(len(grid), across, squeeze=False, sharey=True)
    for line, axes_line in zip(grid, every, strict=True):
        for panel, axes in zip(line, axes_line, strict=True):
            draw_bars(axes, panel)
    shown: dict[str, Artist] = {}
    for axes in every.flat:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    labels, handles = list(shown), list(shown.values())
    columns = 2 if len(labels) > 3 else len(labels)  # few labels are short, many are long
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    if results.smoke:
        title = "SMOKE RUN on the CPU, no kernel figures. " + title
    colour = "#B00000" if results.smoke else "black"
    figure.suptitle(f"{title}\n{_subtitle(results)}", fontsize=11, color=colour)
    return figure


def _subtitle(results: Results) -> str:
    m = results.machine
    fa3 = m.get(FA3, {}).get("version")
    versions = {
        FA3: fa3,
        "PyTorch": m.get("torch"),
        "cuDNN": m.get("cudnn"),
        "commit": m.get("git"),
    }
    named = [f"{name} {value}" for name, value in versions.items() if value]
    inputs = f"inputs {results.inputs}"
    return ", ".join([str(m.get("device")), str(m.get("date", ""))[:10], inputs, *named])


def draw_bars(axes: Axes, panel: Panel) -> None:
    """Draw a panel, each bar with its figure or what stopped it."""
    width = 0.84 / max(1, len(panel.series))
    for i, series in enumerate(panel.series):
        shift = (i - (len(panel.series) - 1) / 2) * width
        heights = [(row.tflops(series.name) or 0.0) if row else 0.0 for row in series.rows]
        bars = axes.bar(
            [x + shift for x in range(len(heights))],
            heights,
            width * 0.94,
            label=series.label,
            color=series.colour,
            hatch=series.hatch,
            edgecolor="white" if series.hatch else series.colour,
            linewidth=0,
        )
        labels = [_bar_label(row, series.name) for row in series.rows]
        axes.bar_label(bars, labels, rotation=90, fontsize=8, padding=2, color="#333333")
    axes.set_title(panel.title, fontsize=10)
    axes.set_xticks(range(len(panel.groups)), panel.groups)
    axes.set(xlabel=panel.axis, ylabel="TFLOP/s")
    axes.margins(y=0.24)  # room for the labels above the bars
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _bar_label(row: Row | None, name: str) -> str:
    if row is None:
        return ""
    value = row.tflops(name)
    if value is not None:
        return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    reason = row.stop_reason(name) or ""
    return STOP_LABELS.get(reason.split(":")[0], "")
