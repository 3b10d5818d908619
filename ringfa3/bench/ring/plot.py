"""The plots of rings: speed by length, by number of GPUs, and by mask."""

from __future__ import annotations

from collections.abc import Iterator

from ringfa3.bench.common.cases import short
from ringfa3.bench.common.plot import COLOURS, Grid, Panel, Series, heads_label
from ringfa3.bench.common.results import RingRow, Row
from ringfa3.bench.ring.cases import LENGTHS, SEEDED, STEPS, UNTIMED


def ring_figures(rows: list[Row]) -> Iterator[tuple[str, Grid]]:
    ring = [row for row in rows if isinstance(row, RingRow)]
    if lengths := [row for row in ring if row.set == LENGTHS]:
        yield LENGTHS, worlds_grid(lengths)
        if len({row.world for row in lengths}) > 1:
            yield "scaling", [scaling_panels(lengths)]
    undrawn = (LENGTHS, *SEEDED, *STEPS, *UNTIMED)
    if masked := [row for row in ring if row.set not in undrawn]:
        yield "masks", worlds_grid(masked)


def worlds_grid(rows: list[RingRow]) -> Grid:
    """A line for each number of GPUs, with all implementations on each case."""
    panels = []
    for world in dict.fromkeys(row.world for row in rows):
        here = [row for row in rows if row.world == world]
        gpus = f"{world} GPU{'s' * (world > 1)}"
        title = f"{gpus}, head dim {here[0].head_dim}, {heads_label(here[0])}"
        names = dict.fromkeys(name for row in rows for name in row.implementations)
        panels.append(
            Panel(
                title,
                [row.label for row in here],
                [
                    Series(name, name, colour, "", list(here))
                    for name, colour in zip(names, COLOURS, strict=False)  # the same in all panels
                    if any(name in row.implementations for row in here)
                ],
                "tokens of all GPUs together",
            )
        )
    return [[panel] for panel in panels]


def scaling_panels(rows: list[RingRow]) -> list[Panel]:
    """RingFA3 by number of GPUs: at a fixed total length, and at a fixed length per GPU."""
    worlds = sorted({row.world for row in rows})
    by_total: dict[int, dict[int, RingRow]] = {}
    by_shard: dict[int, dict[int, RingRow]] = {}
    for row in rows:
        tokens = sum(row.lengths)
        by_total.setdefault(tokens, {})[row.world] = row
        by_shard.setdefault(tokens // row.world, {})[row.world] = row
    total = {f"{short(n)} in all": by_world for n, by_world in sorted(by_total.items())}
    shard = {
        f"{short(n)} a GPU": by_world
        for n, by_world in sorted(by_shard.items())
        if len(by_world) == len(worlds)
    }
    return [
        Panel(
            title,
            [str(world) for world in worlds],
            [
                Series(rows[0].first, label, colour, "", [by_world.get(w) for w in worlds])
                for (label, by_world), colour in zip(series.items(), colours, strict=False)
            ],
            "GPUs",
        )
        for title, series, colours in (
            ("strong scaling", total, COLOURS),
            ("weak scaling", shard, COLOURS[::-1]),
        )
    ]
