"""Results of attention on one GPU, as tables and as lines on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from ringfa3.bench.attention.cases import SPANS
from ringfa3.bench.common.implementations import FA3
from ringfa3.bench.common.report import row_line, row_name
from ringfa3.bench.common.results import (
    FASTER,
    PLAIN,
    Comparison,
    Results,
    Row,
    summaries,
    summary_line,
)
from ringfa3.bench.common.table import caption, figure, ratio, stopped


def attention_tables(results: Results) -> Iterator[Table]:
    """One table for each direction and list of implementations; then the means over the faster of
    FlashAttention-3 and 4, where both were measured, and over each."""
    together: dict[tuple[str, ...], list[Row]] = {}
    for row in results.rows:
        together.setdefault((row.direction, *row.implementations), []).append(row)
    for (direction, first, *_), rows in together.items():
        peers, with_errors = rows[0].peers, any(row.rms for row in rows)
        table = Table(
            title=f"{direction}, {rows[0].dtype}, TFLOP/s; ratio above 1: {first} is faster",
            caption=caption(results, rows),
            caption_style="bold red" if results.smoke else "dim",
        )
        for column in ("set", "mask", "tokens", "heads", "d"):
            table.add_column(column, justify="left" if column in ("set", "mask") else "right")
        table.add_column(first, justify="right", style="bold")
        for peer in peers:
            table.add_column(f"ratio to {peer}" if peer == FASTER else peer, justify="right")
            if peer != FASTER:
                table.add_column("ratio [95% interval]", justify="right")
        for name in error_peers(rows) if with_errors else []:
            table.add_column(error_heading(rows, name), justify="right")
        block = None
        for row in rows:
            here = (row.set, row.head_dim, row.mask if row.set not in ("masks", SPANS) else "")
            if block not in (None, here):
                table.add_section()
            block = here
            table.add_row(*_cells(row, peers, error_peers(rows) if with_errors else []))
        yield table
    if any(s.peer == FASTER for s in summaries(results)):
        yield _means(results)


def attention_lines(results: Results) -> list[str]:
    """The summary against the faster of FA3 and FA4, else FA3, else the first peer with figures,
    else the first peer; and the largest errors."""
    peers = [s.peer for s in summaries(results)] or results.rows[0].implementations[1:]
    chosen = [name for name in (FASTER, FA3, *peers) if name in peers][:1]
    summary = [summary_line(results, name) for name in chosen]
    return [*summary, *_largest_errors(results.rows)]


def attention_line(row: Row) -> str:
    """One row, while the run goes on."""
    if row.stopped or not row.rms:
        return row_line(row)
    errors = ", ".join(f"{n} {error_cell(row, n)}" for n in error_peers([row]))
    errors = f"rms error over that of {errors}"
    return f"{row_name(row)}: {errors}" if row.untimed else f"{row_line(row)}; {errors}"


def error_peers(rows: list[Row]) -> list[str]:
    """Whose errors a table compares with those of the first implementation."""
    found = dict.fromkeys(name for row in rows for name in row.rms)
    return [name for name in (*rows[0].implementations[1:], PLAIN) if name in found]


def error_heading(rows: list[Row], name: str) -> str:
    """With the outputs of each direction, in the order of `error_cell`."""
    outputs = dict.fromkeys(" ".join(row.rms[name]) for row in rows if name in row.rms)
    return f"error / {name}: {'; '.join(outputs)}"


def error_cell(row: Row, name: str) -> str:
    """Ratios of rms errors, by output; below 1 the first implementation is closer to float64."""
    return " ".join("–" if math.isnan(x) else f"{x:.2f}" for x in row.error_ratios(name).values())


def _means(results: Results) -> Table:
    table = Table(title="Geometric means of the ratios, and the worst row")
    for column in ("direction", "set", "d", "over", "rows", "mean", "worst"):
        left = column in ("direction", "set", "over", "worst")
        table.add_column(column, justify="left" if left else "right")
    for s in summaries(results):
        worst = f"{s.worst:.3f} ({s.worst_row})"
        cells = [s.direction, s.set, str(s.head_dim), s.peer, str(s.rows)]
        table.add_row(*cells, f"{s.geometric_mean:.3f}", escape(worst))
    return table


def largest_error(rows: list[Row], name: str) -> tuple[float, str, Row] | None:
    """The largest ratio of rms errors to those of `name`, with its output and row."""
    found = [
        (error, output, row)
        for row in rows
        for output, error in row.error_ratios(name).items()
        if not math.isnan(error)
    ]
    return max(found, key=lambda x: x[0], default=None)


def _largest_errors(rows: list[Row]) -> Iterator[str]:
    """A line for each name in `Row.rms` that the first implementation is compared with."""
    for name in error_peers(rows) if rows else []:
        if found := largest_error(rows, name):
            error, output, row = found
            where = f"{output}, {row_name(row)}"
            yield f"largest rms error over that of {name}: {error:.3f} ({where})"


def _cells(row: Row, peers: list[str], errors: list[str]) -> list[str]:
    label = f"  = {row.label}" if row.equal_flops_of else row.label
    cells = [row.set, row.mask, label, f"{row.heads}:{row.kv_heads}", str(row.head_dim)]
    if row.stopped:
        return [*cells, f"[red]{escape(row.stopped)}[/red]"]
    bound = "*" if row.first_timed and row.first_timed.host_bound[0] else ""
    cells.append(figure(row.tflops(row.first), bound))
    for peer in peers:
        if peer == FASTER:
            found = row.comparison(peer)
            cells.append(ratio(found) if found else "–")
        else:
            missing = Comparison() if row.untimed else Comparison(stopped="not measured")
            cells += _peer(row.comparisons.get(peer, missing))
    return cells + [error_cell(row, name) for name in errors]


def _peer(comparison: Comparison) -> tuple[str, str]:
    if comparison.tflops is None:
        return "–", stopped(comparison)
    mark = "*" if comparison.host_bound[1] else ""
    return figure(comparison.tflops[1], mark), ratio(comparison)
