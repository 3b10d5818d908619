"""The table in a terminal, and the lines below it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich import box
from rich.table import Table

from ringfa3.bench.cluster.options import Options
from ringfa3.bench.cluster.row import Row
from ringfa3.bench.cluster.strategies import OWN

COLUMNS = ("step", "worst", "limit", "work", "tokens", "NVLink", "NIC", "buffers")
CAPTION = (
    "Predicted, not measured. step: time of attention, forward and backward, over that of equal "
    "work without communication, mean and worst of {seeds} batches; limit: what takes longest; "
    "work, tokens: fullest rank over mean; NVLink, NIC: GB that a GPU receives in a step of "
    "{layers} layers; buffers: GB for others' K/V and dK/dV.\n"
    "{forward:.0f} / {backward:.0f} TFLOP/s, NVLink {nvlink:g} GB/s, NIC {nic:g} GB/s a GPU, "
    "{message:g} us a message; hosts of {per_host}; {heads}:{kv_heads} heads of {head_dim}{window}."
)


def table(rows: Sequence[Row], options: Options) -> Table:
    rates, heads = options.rates, options.heads
    caption = CAPTION.format(
        seeds=options.seeds,
        layers=options.layers,
        forward=rates.forward / 1e12,
        backward=rates.backward / 1e12,
        nvlink=rates.nvlink / 1e9,
        nic=rates.nic / 1e9,
        message=rates.message * 1e6,
        per_host=options.per_host,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        window="" if options.window < 0 else f", window {options.window}",
    )
    found = Table(
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
        pad_edge=False,
    )
    found.add_column("mix, GPUs")
    for column in COLUMNS:
        found.add_column(column, justify="left" if column == "limit" else "right")
    for (mix, gpus), case in _cases(rows):
        found.add_row(f"{mix}, {gpus}", style="bold")
        for row in case:
            found.add_row(
                f"  {row.strategy}",
                _ratio(row.step),
                _ratio(row.worst),
                row.limit,
                _ratio(row.work),
                _ratio(row.tokens),
                *map(_gigabytes, (row.nvlink_gb, row.nic_gb, row.held_gb)),
                style="" if row.strategy in OWN else "dim",
            )
        found.add_section()
    return found


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each mix and number of GPUs: the best step of RingFA3 and of the others."""
    lines = []
    for (mix, gpus), case in _cases(rows):
        own, other = (
            min((row for row in case if (row.strategy in OWN) == ours), key=lambda row: row.step)
            for ours in (True, False)
        )
        best = (f"{row.strategy} {_ratio(row.step)}" for row in (own, other))
        lines.append(f"{mix}, {gpus} GPUs: step over ideal: {'; '.join(best)}")
    return lines


def _cases(rows: Sequence[Row]) -> list[tuple[tuple[str, int], list[Row]]]:
    by_case = itertools.groupby(rows, key=lambda row: (row.mix, row.gpus))
    return [(case, list(group)) for case, group in by_case]


def _gigabytes(x: float) -> str:
    return f"{x:.3g}" if 0 < x < 100 else f"{x:.0f}"


def _ratio(x: float) -> str:
    return f"{x:.3f}" if x < 10 else f"{x:.1f}"
