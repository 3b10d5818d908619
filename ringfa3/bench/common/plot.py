"""Results as bars, in the manner of FlashAttention-3's Figure 5. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringfa3.bench.common.cases import CHECKPOINT, ERROR, HOST, LENGTHS, MEMORY, short
from ringfa3.bench.common.implementations import FA3
from ringfa3.bench.common.results import Results, RingRow, Row

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with any colour vision, and in grey.
COLOURS = ("#0072B2", "#E69F00", "#999999", "#56B4E9", "#CC79A7", "#009E73", "#D55E00", "#F0E442")
KINDS = {"out of memory": "OOM", "refused": "n/a", "wrong": "wrong", "failed": "failed"}


@dataclass(frozen=True)
class Series:
    """One colour of bars: the contestant, and the row in which its figure stands for each group."""

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


def draw(results: Results, folder: Path) -> list[Path]:
    """Write `DIRECTION-SET.png` for every direction and set of the results.

    Of rings `DIRECTION-lengths.png`, `DIRECTION-scaling.png` and `DIRECTION-masks.png`.
    """
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    for direction in dict.fromkeys(row.direction for row in results.rows):
        rows = [row for row in results.rows if row.direction == direction]
        for name, grid in _grids(rows):
            title = f"{results.benchmark.capitalize()} {direction}, {rows[0].dtype}"
            drawn.append(folder / f"{direction}-{name}.png")
            _figure(grid, title, results).savefig(drawn[-1], dpi=160)
    return drawn


def _grids(rows: list[Row]) -> Iterator[tuple[str, list[list[Panel]]]]:
    """The figures of one direction: the end of the name, and the panels."""
    ring = [row for row in rows if isinstance(row, RingRow)]
    if lengths := [row for row in ring if row.set == LENGTHS]:
        yield LENGTHS, _worlds(lengths)
        if len({row.world for row in lengths}) > 1:
            yield "scaling", [_scaling(lengths)]
    others = (LENGTHS, MEMORY, ERROR, HOST, CHECKPOINT)
    if masked := [row for row in ring if row.set not in others]:
        yield "masks", _worlds(masked)
    alone = [row for row in rows if not isinstance(row, RingRow)]
    for group in dict.fromkeys(row.set for row in alone):
        here = [row for row in alone if row.set == group]
        yield group, _masks(here) if group == "masks" else _grid(here)


def _worlds(rows: list[RingRow]) -> list[list[Panel]]:
    """A panel for each number of GPUs, downwards; everybody on each case."""
    panels = []
    for world in dict.fromkeys(row.world for row in rows):
        here = [row for row in rows if row.world == world]
        title = f"{world} GPU{'s' * (world > 1)}, head dim {here[0].head_dim}, {_heads(here[0])}"
        names = dict.fromkeys(name for row in rows for name in row.lineup)  # colours stay
        panels.append(
            Panel(
                title,
                [row.label for row in here],
                [
                    Series(name, name, colour, "", list(here))
                    for name, colour in zip(names, COLOURS, strict=False)
                    if any(name in row.lineup for row in here)
                ],
                "tokens of all GPUs together",
            )
        )
    return [[panel] for panel in panels]


def _scaling(rows: list[RingRow]) -> list[Panel]:
    """RingFA3 by number of GPUs: sequences of one length, and of one length for each GPU."""
    worlds = sorted({row.world for row in rows})
    by_total: dict[int, dict[int, RingRow]] = {}
    by_share: dict[int, dict[int, RingRow]] = {}
    for row in rows:
        tokens = sum(row.lengths)
        by_total.setdefault(tokens, {})[row.world] = row
        by_share.setdefault(tokens // row.world, {})[row.world] = row
    whole = {f"{short(n)} in all": found for n, found in sorted(by_total.items())}
    share = {
        f"{short(n)} a GPU": found
        for n, found in sorted(by_share.items())
        if len(found) == len(worlds)
    }
    return [
        Panel(
            title,
            [str(world) for world in worlds],
            [
                Series(rows[0].first, label, colour, "", [found.get(w) for w in worlds])
                for (label, found), colour in zip(series.items(), colours, strict=False)
            ],
            "GPUs",
        )
        for title, series, colours in (
            ("strong scaling", whole, COLOURS),
            ("weak scaling", share, COLOURS[::-1]),
        )
    ]


def _grid(rows: list[Row]) -> list[list[Panel]]:
    """Masks downwards, head dims across; masks across if there is one head dim."""
    masks = list(dict.fromkeys(row.mask for row in rows))
    dims = list(dict.fromkeys(row.head_dim for row in rows))
    grid = [[_panel(rows, mask, d) for d in dims] for mask in masks]
    return [[line[0] for line in grid]] if len(dims) == 1 else grid


def _panel(rows: list[Row], mask: str, d: int) -> Panel:
    here = [row for row in rows if row.mask == mask and row.head_dim == d]
    heads = {_heads(row) for row in here}
    groups = [short(row.lengths[0]) for row in here]
    if len(set(groups)) < len(groups) or any(row.keys for row in here):
        groups = [row.label for row in here]
    return Panel(
        ", ".join([mask, f"head dim {d}", *(heads if len(heads) == 1 else ())]),
        groups,
        [
            Series(name, name, colour, "", list(here))
            for name, colour in zip(rows[0].lineup, COLOURS, strict=False)
        ],
        "sequence length",
    )


def _heads(row: Row) -> str:
    shared = "" if row.heads == row.kv_heads else f" on {row.kv_heads} KV heads"
    return f"{row.heads} heads{shared}"


def _masks(rows: list[Row]) -> list[list[Panel]]:
    """A group for each mask: everybody on it, then everybody on its causal yardstick."""
    masked: list[Row | None] = [row for row in rows if row.beside is None]
    yardstick = {row.beside: row for row in rows}
    beside = [yardstick.get(row.label) for row in masked if row]
    named = list(zip(rows[0].lineup, COLOURS, strict=False))
    series = [
        *(Series(name, name, colour, "", masked) for name, colour in named),
        *(
            Series(name, f"{name}, causal of equal FLOPs", colour, "///", beside)
            for name, colour in named
        ),
    ]
    shown = [s for s in series if any(row and row.tflops(s.name) for row in s.rows)]
    first = next(row for row in masked if row)
    tokens = short(sum(first.lengths))
    title = f"{tokens} tokens, head dim {first.head_dim}, {_heads(first)}"
    groups = [row.label.replace(" of ", "\nof ") for row in masked if row]
    return [[Panel(title, groups, shown, "mask")]]


def _figure(grid: list[list[Panel]], title: str, results: Results) -> Figure:
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
            _bars(axes, panel)
    shown: dict[str, Artist] = {}
    for axes in every.flat:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    labels, handles = list(shown), list(shown.values())
    columns = 2 if len(labels) > 3 else len(labels)  # few are short, many are long
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
    return ", ".join([str(m.get("device")), str(m.get("date", ""))[:10], *named])


def _bars(axes: Axes, panel: Panel) -> None:
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
        said = [_label(row, series.name) for row in series.rows]
        axes.bar_label(bars, said, rotation=90, fontsize=8, padding=2, color="#333333")
    axes.set_title(panel.title, fontsize=10)
    axes.set_xticks(range(len(panel.groups)), panel.groups)
    axes.set(xlabel=panel.axis, ylabel="TFLOP/s")
    axes.margins(y=0.24)  # room for the figures on top
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _label(row: Row | None, name: str) -> str:
    if row is None:
        return ""
    value = row.tflops(name)
    if value is not None:
        return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    why = row.why_not(name) or ""
    return KINDS.get(why.split(":")[0], "")


def redraw(path: Path) -> list[Path]:
    """The plots of a results file, beside it."""
    return draw(Results.load(path), path.parent)
