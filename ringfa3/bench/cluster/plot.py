"""The plot: step over ideal by number of GPUs, a panel for each mix. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringfa3.bench.cluster.options import Options
from ringfa3.bench.cluster.row import Row
from ringfa3.bench.cluster.strategies import (
    DIRECT,
    FLAT_RING,
    SYMMETRIC,
    TWO_LEVELS,
    ULYSSES,
)
from ringfa3.bench.common.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.artist import Artist

STATIC = "static groups of the best size"
STYLES = {  # colour, line, marker
    TWO_LEVELS: (COLOURS[0], "-", "o"),
    DIRECT: (COLOURS[3], "-", "s"),
    SYMMETRIC: (COLOURS[5], "-", "^"),
    FLAT_RING: (COLOURS[6], "--", "v"),
    ULYSSES: (COLOURS[1], "--", "D"),
    STATIC: ("black", ":", "."),
}
TICKS = (1, 2, 5, 10, 20, 50, 100, 1000, 10000)
SHORT, SHORT_TICKS = 40, (1, 1.2, 1.5, 2, 3, 5, 10, 20)  # labels would overlap above SHORT


def draw(rows: Sequence[Row], options: Options, path: Path) -> Path:
    """Writes the plot; returns its path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter

    mixes = list(dict.fromkeys(row.mix for row in rows))
    figure = Figure(figsize=(max(6.4, 3.4 * len(mixes)), 4.6), layout="constrained")
    panels = figure.subplots(1, len(mixes), squeeze=False, sharey=True)[0]
    for axes, mix in zip(panels, mixes, strict=True):
        here = [row for row in rows if row.mix == mix]
        static = [row for row in here if row.strategy not in STYLES]
        best = {row.gpus: row for row in sorted(static, key=lambda row: -row.step)}
        for name, (colour, dashes, marker) in STYLES.items():
            line = [row for row in here if row.strategy == name]
            if name == STATIC:
                line = [best[gpus] for gpus in sorted(best)]
            gpus, step = [row.gpus for row in line], [row.step for row in line]
            if line:
                axes.plot(gpus, step, dashes, color=colour, marker=marker, markersize=5, label=name)
        for row in best.values():
            size = row.strategy.removeprefix("static ")
            at = {"xytext": (4, 3), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(size, (row.gpus, row.step), **at)
        axes.set_title(f"{mix}: {here[0].tokens_per_gpu} tokens a GPU", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        worlds = sorted({row.gpus for row in here})
        axes.xaxis.set_major_locator(FixedLocator(worlds))
        axes.xaxis.set_major_formatter(FixedFormatter([str(world) for world in worlds]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("predicted step over ideal")
    ticks = SHORT_TICKS if panels[0].get_ylim()[1] < SHORT else TICKS
    panels[0].yaxis.set_major_locator(FixedLocator(ticks))  # shared by all
    panels[0].yaxis.set_major_formatter(FixedFormatter([f"{x:g}" for x in ticks]))
    shown: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=3, frameon=False
    )
    heads = options.heads
    figure.suptitle(
        f"Predicted, not measured: attention of a training step, hosts of {options.per_host},\n"
        f"{heads.heads}:{heads.kv_heads} heads of {heads.head_dim}, {options.seeds} batches",
        fontsize=10,
    )
    figure.savefig(path, dpi=160)
    return path
