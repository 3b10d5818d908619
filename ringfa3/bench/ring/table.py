"""Results of rings, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.markup import escape
from rich.table import Table

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.results import Comparison, Results, RingRow
from ringfa3.bench.common.table import caption, figure, ratio, stopped
from ringfa3.bench.ring.cases import CHECKPOINT, FRESH, HOST, MEMORY, STEPS
from ringfa3.bench.ring.summary import MIB, host_microseconds, ring_rows


def ring_tables(results: Results) -> Iterator[Table]:
    """Speed, a table for each direction; memory; checkpointed blocks; load balance."""
    rows = ring_rows(results)
    others = (MEMORY, HOST, *STEPS)
    for direction in dict.fromkeys(row.direction for row in rows):
        here = [row for row in rows if row.direction == direction and row.set not in others]
        if here:
            yield _speed(results, here)
    if with_memory := [row for row in rows if row.set == MEMORY and row.memory]:
        yield _memory(with_memory)
    if blocks := [row for row in rows if row.set == CHECKPOINT]:
        yield _checkpoint(results, blocks)
    if fresh := [row for row in rows if row.set == FRESH]:
        yield _fresh(results, fresh)
    if balance := {
        (row.label, row.world): row for row in rows if row.world > 1 and row.set not in others
    }:
        yield _load_balance(list(balance.values()))


def _speed(results: Results, rows: list[RingRow]) -> Table:
    first = rows[0].first
    peers = list(dict.fromkeys(name for row in rows for name in row.implementations[1:]))
    table = Table(
        title=f"{rows[0].direction}, {rows[0].dtype}, TFLOP/s of one GPU; ratio above 1: {first} "
        f"is faster; {first} ran on {_paths(rows)}",
        caption=caption(results, rows),
        caption_style="bold red" if results.smoke else "dim",
    )
    table.add_column("GPUs", justify="right")
    table.add_column("case", no_wrap=True)
    table.add_column(first, justify="right", style="bold")
    table.add_column("of single GPU", justify="right", no_wrap=True)
    for name in (*peers, "error: ring / single", "host, µs"):
        table.add_column(name, justify="right")
    for i, row in enumerate(rows):
        if i and row.world != rows[i - 1].world:
            table.add_section()
        table.add_row(*_cells(row, peers))
    return table


def _paths(rows: list[RingRow]) -> str:
    """Which engines, transports and forward modes ran."""
    paths = {_path(row) for row in rows if row.transport} or {row.engine for row in rows}
    return ", ".join(sorted(paths))


def _path(row: RingRow) -> str:
    path = f"{row.engine} and {row.transport}"
    if row.direction != FORWARD or row.transport != "symmetric":
        return path
    return f"{path} ({'hop by hop' if row.gathered is None else 'one launch'})"


def _cells(row: RingRow, peers: list[str]) -> list[str]:
    cells = [str(row.world), row.label]
    if row.stopped:
        return [*cells, "–", f"[red]{escape(row.stopped)}[/red]"]
    bound = "*" if row.first_timed and row.first_timed.host_bound[0] else ""
    cells.append(figure(row.tflops(row.first), bound))
    best = row.fastest_baseline
    cells.append(ratio(best[1]) if best else "–")
    cells += [_peer(row.comparisons.get(peer)) for peer in peers]
    growth = row.error_growth
    cells.append(f"{max(growth.values()):.2f}" if growth else "–")
    timed = row.first_timed
    host = timed.host_seconds[0] if timed and timed.host_seconds else 0.0
    cells.append(f"{host * 1e6:.0f}" if host else "–")
    return cells


def _peer(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    if comparison.tflops is None:
        return stopped(comparison)
    mark = "*" if comparison.host_bound[1] else ""
    return f"{figure(comparison.tflops[1], mark)} ({comparison.ratio:.3f})"


def _memory(rows: list[RingRow]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.memory))
    table = Table(
        title="MiB of a forward and backward beyond the inputs, as the device counts them, on the "
        "rank with most; in brackets what remains after the call. Gathered K/V: the part of the "
        f"peak of {rows[0].first} that its forward in one launch gathers"
    )
    for column in ("GPUs", "case", *names, "gathered K/V"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        gathered = "–" if row.gathered is None else f"{row.gathered / MIB:.0f}"
        used = (_used(row, name) for name in names)
        table.add_row(str(row.world), row.label, *used, gathered)
    return table


def _used(row: RingRow, name: str) -> str:
    used = row.memory.get(name, "")
    if isinstance(used, str):
        return f"[dim]{escape(used)}[/dim]"
    return f"{used / MIB:.0f} ({row.retained.get(name, 0) / MIB:.0f})"


def _checkpoint(results: Results, rows: list[RingRow]) -> Table:
    first = rows[0].first
    table = Table(
        title=f"A block's forward and backward, {rows[0].dtype}; ratio above 1: {first} is faster; "
        f"the ring ran on {_paths(rows)}. Peak MiB of tensors beyond the inputs; in brackets those "
        "between forward and backward",
        caption=caption(results, rows),
        caption_style="bold red" if results.smoke else "dim",
    )
    rings = ("rings forward", "backward")
    for column in ("GPUs", "case", "attention", "ms", "ratio [95% interval]", *rings, "MiB"):
        left = column in ("case", "attention")
        table.add_column(column, justify="left" if left else "right")
    return _with_lines(table, rows, lambda row, name: (*row.rings[name], _used(row, name)))


def _fresh(results: Results, rows: list[RingRow]) -> Table:
    table = Table(
        title=f"A step of {rows[0].dtype} ring calls on {_paths(rows)}, host counted; ratio above "
        "1: a plan that has run before is faster. Microseconds of the host, on the rank with most",
        caption=caption(results, rows),
        caption_style="bold red" if results.smoke else "dim",
    )
    for column in ("GPUs", "case", "plan", "ms", "ratio [95% interval]", "forward", "backward"):
        table.add_column(column, justify="left" if column in ("case", "plan") else "right")
    return _with_lines(table, rows, host_microseconds)


def _with_lines(
    table: Table, rows: list[RingRow], cells: Callable[[RingRow, str], tuple[object, ...]]
) -> Table:
    """The table with a line for each implementation of a row: its time, ratio and `cells`."""
    for row in rows:
        table.add_section()
        if row.stopped:
            table.add_row(str(row.world), row.label, f"[red]{escape(row.stopped)}[/red]")
            continue
        for name in row.implementations:
            against = ratio(row.comparisons[name]) if name in row.comparisons else ""
            line = row.world, row.label, name, figure(row.milliseconds(name)), against
            table.add_row(*map(str, (*line, *cells(row, name))))
    return table


def _load_balance(rows: list[RingRow]) -> Table:
    table = Table(title="Load balance of the plan")
    for column in ("GPUs", "case", "work, most / mean", "tiles full", "K/V moved, MiB", "of all"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        cells = (f"{row.imbalance:.3f}", f"{row.tile_occupancy:.3f}", f"{row.kv_bytes / MIB:.3g}")
        table.add_row(str(row.world), row.label, *cells, f"{row.kv_share:.3f}")
    return table
