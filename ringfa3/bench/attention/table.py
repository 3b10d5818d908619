"""Results of attention on one GPU, as tables and as a line on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from ringfa3.bench.common.fa3 import FA3
from ringfa3.bench.common.results import Comparison, Results, Row, summaries, summary_line
from ringfa3.bench.common.table import caption, figure, ratio, stopped


def attention_tables(results: Results) -> Iterator[Table]:
    """One table for each direction and list of implementations."""
    together: dict[tuple[str, ...], list[Row]] = {}
    for row in results.rows:
        together.setdefault((row.direction, *row.implementations), []).append(row)
    for (direction, first, *peers), rows in together.items():
        table = Table(
            title=f"{direction}, {rows[0].dtype}, TFLOP/s; ratio above 1: {first} is faster",
            caption=caption(results, rows),
            caption_style="bold red" if results.smoke else "dim",
        )
        for column in ("set", "mask", "tokens", "heads", "d"):
            table.add_column(column, justify="left" if column in ("set", "mask") else "right")
        table.add_column(first, justify="right", style="bold")
        for peer in peers:
            table.add_column(peer, justify="right")
            table.add_column("ratio [95% interval]", justify="right")
        block = None
        for row in rows:
            here = (row.set, row.head_dim, row.mask if row.set != "masks" else "")
            if block not in (None, here):
                table.add_section()
            block = here
            table.add_row(*_cells(row, peers))
        yield table


def attention_lines(results: Results) -> list[str]:
    """The summary against FA3, else the first peer with figures, else the first peer."""
    peers = [s.peer for s in summaries(results)] or results.rows[0].implementations[1:]
    return [summary_line(results, FA3 if FA3 in peers else peers[0])]


def _cells(row: Row, peers: list[str]) -> list[str]:
    label = f"  = {row.label}" if row.equal_flops_of else row.label
    cells = [row.set, row.mask, label, f"{row.heads}:{row.kv_heads}", str(row.head_dim)]
    if row.stopped:
        return [*cells, f"[red]{escape(row.stopped)}[/red]"]
    bound = "*" if row.first_timed and row.first_timed.host_bound[0] else ""
    cells.append(figure(row.tflops(row.first), bound))
    for peer in peers:
        cells += _peer(row.comparisons.get(peer, Comparison(stopped="not measured")))
    return cells


def _peer(comparison: Comparison) -> tuple[str, str]:
    if comparison.tflops is None:
        return "–", stopped(comparison)
    mark = "*" if comparison.host_bound[1] else ""
    return figure(comparison.tflops[1], mark), ratio(comparison)
