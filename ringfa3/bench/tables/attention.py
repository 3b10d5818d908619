"""The tables of one GPU: geometric means and worst rows, then every row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ringfa3.bench.attention.table import error_cell, error_heading, error_peers, largest_error
from ringfa3.bench.common.results import FASTER, Results, Row, summaries
from ringfa3.bench.tables.markdown import folded, peer, ratio, speed, table

FOLD = 4  # more rows than this are folded


def attention_block(results: Results) -> Iterator[str]:
    """For each list of implementations."""
    for names in dict.fromkeys(tuple(row.implementations) for row in results.rows):
        rows = [row for row in results.rows if tuple(row.implementations) == names]
        first, peers = names[0], rows[0].peers
        if len(rows) > FOLD:
            yield from _means(replace(results, rows=rows), first, peers)
            yield from folded(f"All {len(rows)} rows", _rows(rows, first, peers))
        else:
            yield from _rows(rows, first, peers)


def _means(results: Results, first: str, peers: list[str]) -> Iterator[str]:
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
        yield from table(columns, rows, 2)


def _largest_error(rows: list[Row], name: str) -> str:
    found = largest_error(rows, name)
    if found is None:
        return ""
    error, output, row = found
    return f"{error:.2f} ({output}, {row.mask} {row.label})"


def _rows(rows: list[Row], first: str, peers: list[str]) -> Iterator[str]:
    columns = ["direction", "mask", "tokens", "heads", "d", f"{first}, TFLOP/s"]
    columns += [f"{name}, ratio [95%]" for name in peers]
    errors = error_peers(rows)
    columns += [error_heading(rows, name) for name in errors]
    yield from table(columns, [_cells(row, peers, errors) for row in rows], 3)


def _cells(row: Row, peers: list[str], errors: list[str]) -> list[str]:
    label = f"= {row.label}" if row.equal_flops_of else row.label
    shape = [row.direction, row.mask, label, f"{row.heads}:{row.kv_heads}", str(row.head_dim)]
    if row.stopped:
        return [*shape, row.stopped, *("" for _ in [*peers, *errors])]
    cells = [ratio(row.comparison(name)) if name == FASTER else peer(row, name) for name in peers]
    return [*shape, speed(row, row.first), *cells, *(error_cell(row, name) for name in errors)]
