"""Results of attention on one GPU, as tables and as lines on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ringfa3.bench.common.implementations import FA3
from ringfa3.bench.common.report import row_line, row_name
from ringfa3.bench.common.results import FASTER, PLAIN, Results, Row, summaries, summary_line
from ringfa3.bench.common.table import Table, peer, ratio, speed

FOLD = 4  # more rows than this are folded


def attention_tables(results: Results) -> Iterator[Table]:
    """For each list of implementations: means and worst rows, where it has many; every row."""
    for names in dict.fromkeys(tuple(row.implementations) for row in results.rows):
        rows = [row for row in results.rows if tuple(row.implementations) == names]
        first, peers, many = names[0], rows[0].peers, len(rows) > FOLD
        if many:
            yield from _means(replace(results, rows=rows), first, peers)
        yield _rows(rows, first, peers, f"All {len(rows)} rows" if many else None)


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


def _means(results: Results, first: str, peers: list[str]) -> Iterator[Table]:
    by_group = {(s.direction, s.set, s.head_dim, s.peer): s for s in summaries(results)}
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in results.rows:
        groups.setdefault((row.direction, row.series, row.head_dim), []).append(row)
    errors = error_peers(results.rows)
    rows = []
    for (direction, series, d), here in groups.items():
        cells = [direction, series, str(d)]
        for name in peers:
            s = by_group.get((direction, series, d, name))
            cells += (
                [f"{s.geometric_mean:.3f}", f"{s.worst:.3f} ({s.worst_row})"] if s else ["", ""]
            )
        cells += [_largest_error(here, name) for name in errors]
        if any(cells[3:]):
            rows.append(cells)
    columns = ["direction", "set", "d"]
    for name in peers:
        columns += [f"{first} / {name}, geometric mean", "worst row"]
    columns += [f"largest error / {name}" for name in errors]
    if rows:  # a set may have no peers
        yield Table(columns, rows, 2)


def _largest_error(rows: list[Row], name: str) -> str:
    found = largest_error(rows, name)
    if found is None:
        return ""
    error, output, row = found
    return f"{error:.2f} ({output}, {row.mask} {row.label})"


def _rows(rows: list[Row], first: str, peers: list[str], folded: str | None) -> Table:
    columns = ["direction", "mask", "tokens", "heads", "d", f"{first}, TFLOP/s"]
    columns += [f"{name}, ratio [95%]" for name in peers]
    errors = error_peers(rows)
    columns += [error_heading(rows, name) for name in errors]
    return Table(columns, [_cells(row, peers, errors) for row in rows], 3, folded=folded)


def _cells(row: Row, peers: list[str], errors: list[str]) -> list[str]:
    label = f"= {row.label}" if row.equal_flops_of else row.label
    shape = [row.direction, row.mask, label, f"{row.heads}:{row.kv_heads}", str(row.head_dim)]
    if row.stopped:
        return [*shape, row.stopped, *("" for _ in [*peers, *errors])]
    cells = [ratio(row.comparison(name)) if name == FASTER else peer(row, name) for name in peers]
    return [*shape, speed(row, row.first), *cells, *(error_cell(row, name) for name in errors)]
