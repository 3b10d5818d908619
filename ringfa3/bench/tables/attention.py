"""The tables of one GPU: geometric means and worst rows, then every row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ringfa3.bench.common.results import Results, Row, summaries
from ringfa3.bench.tables.markdown import folded, peer, speed, table

FOLD = 4  # more rows than this are folded


def attention_block(results: Results) -> Iterator[str]:
    """For each list of implementations."""
    for names in dict.fromkeys(tuple(row.implementations) for row in results.rows):
        rows = [row for row in results.rows if tuple(row.implementations) == names]
        first, *peers = names
        if len(rows) > FOLD:
            yield from _means(replace(results, rows=rows), first, peers)
            yield from folded(f"All {len(rows)} rows", _rows(rows, first, peers))
        else:
            yield from _rows(rows, first, peers)


def _means(results: Results, first: str, peers: list[str]) -> Iterator[str]:
    by_group = {(s.direction, s.set, s.head_dim, s.peer): s for s in summaries(results)}
    rows = []
    for direction, series, d in dict.fromkeys(key[:3] for key in by_group):
        cells = [direction, series, str(d)]
        for name in peers:
            s = by_group.get((direction, series, d, name))
            cells += (
                [f"{s.geometric_mean:.3f}", f"{s.worst:.3f} ({s.worst_row})"] if s else ["", ""]
            )
        rows.append(cells)
    columns = ["direction", "set", "d"]
    for name in peers:
        columns += [f"{first} / {name}, geometric mean", "worst row"]
    yield from table(columns, rows, 2)


def _rows(rows: list[Row], first: str, peers: list[str]) -> Iterator[str]:
    columns = ["direction", "mask", "tokens", "heads", "d", f"{first}, TFLOP/s"]
    columns += [f"{name}, ratio [95%]" for name in peers]
    yield from table(columns, [_cells(row, peers) for row in rows], 3)


def _cells(row: Row, peers: list[str]) -> list[str]:
    label = f"= {row.label}" if row.equal_flops_of else row.label
    shape = [row.direction, row.mask, label, f"{row.heads}:{row.kv_heads}", str(row.head_dim)]
    if row.stopped:
        return [*shape, row.stopped, *("" for _ in peers)]
    return [*shape, speed(row, row.first), *(peer(row, name) for name in peers)]
