"""Results of rings as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from ringfa3.bench.common.cases import CHECKPOINT, FORWARD, HOST, MEMORY
from ringfa3.bench.common.results import Match, Results, RingRow
from ringfa3.bench.common.table import caption, figure, ratio, stopped
from ringfa3.bench.ring.summary import MIB, ring_rows


def ring_tables(results: Results) -> Iterator[Table]:
    """Speed, a table for each direction; memory; checkpoints; how the plan spreads the cases."""
    rows = ring_rows(results)
    others = (MEMORY, HOST, CHECKPOINT)
    for direction in dict.fromkeys(row.direction for row in rows):
        here = [row for row in rows if row.direction == direction and row.set not in others]
        if here:
            yield _speed(results, here)
    if weighed := [row for row in rows if row.set == MEMORY and row.memory]:
        yield _memory(weighed)
    if blocks := [row for row in rows if row.set == CHECKPOINT]:
        yield _checkpoint(results, blocks)
    if spread := {
        (row.label, row.world): row for row in rows if row.world > 1 and row.set not in others
    }:
        yield _spread(list(spread.values()))


def _speed(results: Results, rows: list[RingRow]) -> Table:
    first = rows[0].first
    peers = list(dict.fromkeys(name for row in rows for name in row.lineup[1:]))
    table = Table(
        title=f"{rows[0].direction}, {rows[0].dtype}, TFLOP/s of one GPU; ratio above 1: {first} "
        f"is faster; {first} ran on {_all_ran(rows)}",
        caption=caption(results, rows),
        caption_style="bold red" if results.smoke else "dim",
    )
    table.add_column("GPUs", justify="right")
    table.add_column("case", no_wrap=True)
    table.add_column(first, justify="right", style="bold")
    table.add_column("of the yardstick", justify="right", no_wrap=True)
    for name in (*peers, "error: ring / alone", "host, µs"):
        table.add_column(name, justify="right")
    for i, row in enumerate(rows):
        if i and row.world != rows[i - 1].world:
            table.add_section()
        table.add_row(*_cells(row, peers))
    return table


def _all_ran(rows: list[RingRow]) -> str:
    ran = {_ran(row) for row in rows if row.transport} or {row.engine for row in rows}
    return ", ".join(sorted(ran))


def _ran(row: RingRow) -> str:
    said = f"{row.engine} and {row.transport}"
    if row.direction != FORWARD or row.transport != "symmetric":
        return said
    return f"{said} ({'hop by hop' if row.gathered is None else 'one launch'})"


def _cells(row: RingRow, peers: list[str]) -> list[str]:
    cells = [str(row.world), row.label]
    if row.stopped:
        return [*cells, "–", f"[red]{escape(row.stopped)}[/red]"]
    bound = "*" if row.head and row.head.host_bound[0] else ""
    cells.append(figure(row.tflops(row.first), bound))
    best = row.of_yardstick
    cells.append(ratio(best[1]) if best else "–")
    cells += [_peer(row.matches.get(peer)) for peer in peers]
    growth = row.error_growth
    cells.append(f"{max(growth.values()):.2f}" if growth else "–")
    host = row.head.host_seconds[0] if row.head and row.head.host_seconds else 0.0
    cells.append(f"{host * 1e6:.0f}" if host else "–")
    return cells


def _peer(match: Match | None) -> str:
    if match is None:
        return ""
    if match.tflops is None:
        return stopped(match)
    return f"{figure(match.tflops[1], '*' if match.host_bound[1] else '')} ({match.ratio:.3f})"


def _memory(rows: list[RingRow]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.memory))
    table = Table(
        title="MiB of a forward and backward beyond the inputs, by the device; in brackets what "
        "stays; the rank with most. Part of the first: what its forward in one launch gathers"
    )
    for column in ("GPUs", "case", *names, "K/V gathered"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        gathered = "–" if row.gathered is None else f"{row.gathered / MIB:.0f}"
        weights = (_weight(row, name) for name in names)
        table.add_row(str(row.world), row.label, *weights, gathered)
    return table


def _weight(row: RingRow, name: str) -> str:
    held = row.memory.get(name, "")
    if isinstance(held, str):
        return f"[dim]{escape(held)}[/dim]"
    return f"{held / MIB:.0f} ({row.kept.get(name, 0) / MIB:.0f})"


def _checkpoint(results: Results, rows: list[RingRow]) -> Table:
    first = rows[0].first
    table = Table(
        title=f"A block's forward and backward, {rows[0].dtype}; ratio above 1: {first} is faster; "
        f"the ring ran on {_all_ran(rows)}. MiB of tensors beyond the inputs at the peak; in "
        "brackets what is held between forward and backward",
        caption=caption(results, rows),
        caption_style="bold red" if results.smoke else "dim",
    )
    rings = ("rings forward", "backward")
    for column in ("GPUs", "case", "attention", "ms", "ratio [95% interval]", *rings, "MiB"):
        left = column in ("case", "attention")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        table.add_section()
        if row.stopped:
            table.add_row(str(row.world), row.label, f"[red]{escape(row.stopped)}[/red]")
            continue
        for name in row.lineup:
            held = ratio(row.matches[name]) if name in row.matches else ""
            cells = (figure(row.milliseconds(name)), held, *map(str, row.rings[name]))
            table.add_row(str(row.world), row.label, name, *cells, _weight(row, name))
    return table


def _spread(rows: list[RingRow]) -> Table:
    table = Table(title="How the plan spreads a case")
    for column in ("GPUs", "case", "work, most / mean", "tiles full", "K/V moved, MiB", "of all"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        cells = (f"{row.imbalance:.3f}", f"{row.fullness:.3f}", f"{row.kv_bytes / MIB:.3g}")
        table.add_row(str(row.world), row.label, *cells, f"{row.kv_share:.3f}")
    return table
