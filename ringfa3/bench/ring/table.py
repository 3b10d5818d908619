"""The tables of rings: speed, memory, host time, errors, and whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.common.results import Results, RingRow
from ringfa3.bench.common.table import Table, figure, peer, ratio, speed
from ringfa3.bench.ring.cases import CHECKPOINT, ERROR, FRESH, HOST, MEMORY
from ringfa3.bench.ring.summary import MIB, host_microseconds, ring_rows


def ring_title(results: Results) -> str:
    """Which engines, transports and forward modes ran."""
    rows = ring_rows(results)
    paths = {_path(row) for row in rows if row.transport} or {row.engine for row in rows}
    return f"the ring ran on {', '.join(sorted(paths))}"


def _path(row: RingRow) -> str:
    path = f"{row.engine} and {row.transport}"
    if row.direction != FORWARD or row.transport != "symmetric":
        return path
    return f"{path} ({'hop by hop' if row.gathered is None else 'one launch'})"


def ring_tables(results: Results) -> Iterator[Table]:
    rows = ring_rows(results)
    for names in dict.fromkeys(
        (row.direction, tuple(row.implementations)) for row in rows if row.set not in TABLES
    ):
        yield _speed([row for row in rows if (row.direction, tuple(row.implementations)) == names])
    for name, make in TABLES.items():
        if here := [row for row in rows if row.set == name]:
            yield make(here)


def _speed(rows: list[RingRow]) -> Table:
    """TFLOP/s of one GPU. "over single GPU": the ratio to the faster baseline, if there is one."""
    first = rows[0]
    peers = [name for name in first.implementations[1:] if name not in first.baselines]
    columns = ["direction", "GPUs", "case", f"{first.first}, TFLOP/s a GPU"]
    columns += ["over single GPU [95%]"] * bool(first.baselines)
    columns += [f"{name}, ratio [95%]" for name in peers]
    cells = []
    for row in rows:
        baseline = row.fastest_baseline
        cells.append(
            [row.direction, str(row.world), row.label, row.stopped or speed(row, row.first)]
            + [ratio(baseline[1]) if baseline else ""] * bool(first.baselines)
            + [peer(row, name) for name in peers]
        )
    return Table(columns, cells)


def _memory(rows: list[RingRow]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.memory)) or [rows[0].first]
    note = (
        "Cells have the MiB that the device counts for a forward and backward beyond the inputs,",
        "on the rank with most. Brackets have what remains allocated after the call.",
    )
    cells = [
        [str(row.world), row.label]
        + (_instead(row, len(names)) if row.stopped else [_mib(row, name) for name in names])
        for row in rows
    ]
    return Table(["GPUs", "case", *names], cells, note=note)


def _mib(row: RingRow, name: str) -> str:
    used = row.memory.get(name, "")
    if isinstance(used, str):
        return used
    return f"{used / MIB:.0f} ({row.retained.get(name, 0) / MIB:.0f})"


def _host(rows: list[RingRow]) -> Table:
    note = ("Cells have the microseconds of the host to start a call on an idle GPU, by rank.",)
    cells = []
    for row in rows:
        if row.stopped:
            cells.append([row.direction, row.label, *_instead(row, 2)])
        for name, seconds in row.host.items():
            times = ", ".join(f"{1e6 * s:.0f}" for s in seconds)
            cells.append([row.direction, row.label, name, times])
    return Table(["direction", "case", "call", "µs"], cells, 3, note)


def _errors(rows: list[RingRow]) -> Table:
    note = ("Cells have the ring's largest error against float64 over that of RingFA3 on one GPU.",)
    cells = []
    for row in rows:
        if row.stopped:
            cells.append([row.direction, str(row.world), row.label, *_instead(row, 2)])
            continue
        errors = {row.first: row.errors} | {n: c.errors for n, c in row.comparisons.items()}
        for name, by_output in errors.items():
            growth = ", ".join(f"{o} {g:.3f}" for o, g in row.growth(by_output).items())
            cells.append([row.direction, str(row.world), row.label, name, growth])
    return Table(["direction", "GPUs", "case", "ring", "error growth"], cells, 4, note)


def _checkpoint(rows: list[RingRow]) -> Table:
    first = rows[0].first
    note = (
        f"Rows have a block's forward and backward. Above 1, `{first}` is faster. MiB count",
        "tensors beyond the inputs at the peak, and in brackets between forward and backward.",
    )

    def more(row: RingRow, name: str) -> tuple[str, ...]:
        return ", ".join(map(str, row.rings[name])), _mib(row, name)

    columns = ["GPUs", "case", "attention", "ms", f"{first}: ratio [95%]", "rings fwd, bwd", "MiB"]
    return _lines(columns, rows, more, note)


def _fresh(rows: list[RingRow]) -> Table:
    note = (
        "Rows have the ring calls of a step with its own packing, the host counted. The ratio is",
        "the time of a plan's first step over that of its third one, a median of pairs. The last",
        "columns have the microseconds of the host to start a call, on the rank with most.",
    )
    columns = ["GPUs", "case", "plan", "ms", "ratio [95%]", "forward, µs", "backward, µs"]
    return _lines(columns, rows, host_microseconds, note)


def _lines(
    columns: list[str],
    rows: list[RingRow],
    more: Callable[[RingRow, str], tuple[str, ...]],
    note: tuple[str, ...],
) -> Table:
    """A table with a line for each implementation of a row: its time, ratio and `more` cells."""
    cells = []
    for row in rows:
        if row.stopped:
            cells.append([str(row.world), row.label, *_instead(row, len(columns) - 2)])
            continue
        for name in row.implementations:
            against = ratio(row.comparisons[name]) if name in row.comparisons else ""
            line = [str(row.world), row.label, name, figure(row.milliseconds(name)), against]
            cells.append([*line, *more(row, name)])
    return Table(columns, cells, 3, note)


def _instead(row: RingRow, cells: int) -> list[str]:
    """Cells of a row without figures: why it has none."""
    return [row.stopped or "", *[""] * (cells - 1)]


TABLES: dict[str, Callable[[list[RingRow]], Table]] = {
    MEMORY: _memory,
    HOST: _host,
    ERROR: _errors,
    CHECKPOINT: _checkpoint,
    FRESH: _fresh,
}
