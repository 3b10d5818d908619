"""The tables of rings: speed, memory, host time, errors, and checkpointed blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ringfa3.bench.common.results import Results, RingRow
from ringfa3.bench.common.table import figure
from ringfa3.bench.ring.cases import CHECKPOINT, ERROR, FRESH, HOST, MEMORY
from ringfa3.bench.ring.summary import MIB, host_microseconds, ring_rows
from ringfa3.bench.tables.markdown import peer, ratio, speed, table


def ring_block(results: Results) -> Iterator[str]:
    rows = ring_rows(results)
    for names in dict.fromkeys(
        (row.direction, tuple(row.implementations)) for row in rows if row.set not in TABLES
    ):
        yield from _speed(
            [row for row in rows if (row.direction, tuple(row.implementations)) == names]
        )
    for name, make in TABLES.items():
        if here := [row for row in rows if row.set == name]:
            yield from make(here)


def _speed(rows: list[RingRow]) -> Iterator[str]:
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
    yield from table(columns, cells)


def _memory(rows: list[RingRow]) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.memory)) or [rows[0].first]
    yield "Cells have the MiB that the device counts for a forward and backward beyond the inputs,"
    yield "on the rank with most. Brackets have what remains allocated after the call."
    yield ""
    cells = [
        [str(row.world), row.label]
        + (_instead(row, len(names)) if row.stopped else [_mib(row, name) for name in names])
        for row in rows
    ]
    yield from table(["GPUs", "case", *names], cells)


def _mib(row: RingRow, name: str) -> str:
    used = row.memory.get(name, "")
    if isinstance(used, str):
        return used
    return f"{used / MIB:.0f} ({row.retained.get(name, 0) / MIB:.0f})"


def _host(rows: list[RingRow]) -> Iterator[str]:
    yield "Cells have the microseconds of the host to start a call on an idle GPU, by rank."
    yield ""
    cells = []
    for row in rows:
        if row.stopped:
            cells.append([row.direction, row.label, *_instead(row, 2)])
        for name, seconds in row.host.items():
            times = ", ".join(f"{1e6 * s:.0f}" for s in seconds)
            cells.append([row.direction, row.label, name, times])
    yield from table(["direction", "case", "call", "µs"], cells, 3)


def _errors(rows: list[RingRow]) -> Iterator[str]:
    yield "Cells have the ring's largest error against float64 over that of RingFA3 on one GPU."
    yield ""
    cells = []
    for row in rows:
        if row.stopped:
            cells.append([row.direction, str(row.world), row.label, *_instead(row, 2)])
            continue
        errors = {row.first: row.errors} | {n: c.errors for n, c in row.comparisons.items()}
        for name, by_output in errors.items():
            growth = ", ".join(f"{o} {g:.3f}" for o, g in row.growth(by_output).items())
            cells.append([row.direction, str(row.world), row.label, name, growth])
    yield from table(["direction", "GPUs", "case", "ring", "error growth"], cells, 4)


def _checkpoint(rows: list[RingRow]) -> Iterator[str]:
    first = rows[0].first
    yield f"Rows have a block's forward and backward. Above 1, `{first}` is faster. MiB count"
    yield "tensors beyond the inputs at the peak, and in brackets between forward and backward."
    yield ""

    def more(row: RingRow, name: str) -> tuple[str, ...]:
        return ", ".join(map(str, row.rings[name])), _mib(row, name)

    columns = ["GPUs", "case", "attention", "ms", f"{first}: ratio [95%]", "rings fwd, bwd", "MiB"]
    yield from _lines(columns, rows, more)


def _fresh(rows: list[RingRow]) -> Iterator[str]:
    yield "Rows have the ring calls of a step with its own packing, the host counted. The ratio is"
    yield "the time of a plan's first step over that of its third one, a median of pairs. The last"
    yield "columns have the microseconds of the host to start a call, on the rank with most."
    yield ""
    columns = ["GPUs", "case", "plan", "ms", "ratio [95%]", "forward, µs", "backward, µs"]
    yield from _lines(columns, rows, host_microseconds)


def _lines(
    columns: list[str], rows: list[RingRow], more: Callable[[RingRow, str], tuple[str, ...]]
) -> Iterator[str]:
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
    yield from table(columns, cells, 3)


def _instead(row: RingRow, cells: int) -> list[str]:
    """Cells of a row without figures: why it has none."""
    return [row.stopped or "", *[""] * (cells - 1)]


TABLES: dict[str, Callable[[list[RingRow]], Iterator[str]]] = {
    MEMORY: _memory,
    HOST: _host,
    ERROR: _errors,
    CHECKPOINT: _checkpoint,
    FRESH: _fresh,
}
