"""The summary of a ring run: a line for each set."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ringfa3.bench.common.report import row_line, row_name
from ringfa3.bench.common.results import Results, RingRow, Row
from ringfa3.bench.common.table import figure
from ringfa3.bench.common.timing import median
from ringfa3.bench.ring.cases import (
    CHECKPOINT,
    ERROR,
    FRESH,
    HOST,
    LENGTHS,
    MAGI,
    MEMORY,
    MIXES,
)
from ringfa3.bench.ring.peers import ZIGZAG

MIB = 1 << 20


def ring_lines(results: Results) -> list[str]:
    """By set, in the order of measurement; then the number of rows without figures."""
    rows = ring_rows(results)
    label = "SMOKE RUN, no kernel figures: " if results.smoke else ""
    lines = []
    for name in dict.fromkeys(row.set for row in rows):
        here = [row for row in rows if row.set == name and not row.stopped]
        text = LINES.get(name, masks_line)(here) if here else ""
        lines.append(f"{label}{name}: {text or 'no row was measured'}")
    if stopped := [row for row in rows if row.stopped]:
        lines.append(f"{len(stopped)} rows without figures, the first: {stopped[0].stopped}")
    return lines


def ring_row_line(row: Row) -> str:
    """One line of a finished row; of a set without speed, what the set gives."""
    if isinstance(row, RingRow) and not row.stopped and not row.first_timed:
        return f"{row_name(row)}: {LINES.get(row.set, masks_line)([row])}"
    return row_line(row)


def ring_rows(results: Results) -> list[RingRow]:
    return [row for row in results.rows if isinstance(row, RingRow)]


def _lengths(rows: list[RingRow]) -> str:
    """By direction and world: speed over the single-GPU baseline, and over each peer."""
    texts = []
    for direction, world in dict.fromkeys((row.direction, row.world) for row in rows):
        here = [row for row in rows if (row.direction, row.world) == (direction, world)]
        shares = [row.fastest_baseline[1].ratio for row in here if row.fastest_baseline]
        text = f"{direction} on {world}: {_span(shares)} of the single-GPU baseline"
        peers = dict.fromkeys(
            name for row in here for name in row.implementations[1:] if name not in row.baselines
        )
        for name in peers:
            ratios = [c.ratio for row in here if (c := row.comparisons.get(name)) and c.ratio]
            text += f", {_span(ratios)} of {name}" if ratios else ""
        texts.append(text)
    return "; ".join(texts)


def masks_line(rows: list[RingRow]) -> str:
    """By case and direction: speed over each of the others; and the load balance of the plan."""
    texts = []
    for label in (labels := dict.fromkeys(row.label for row in rows)):
        here = [row for row in rows if row.label == label]
        case = f"{label}, " if len(labels) > 1 else ""
        for row in here:
            ratios = [f"{c.ratio:.3f} of {name}" for name, c in row.comparisons.items() if c.ratio]
            texts.append(f"{case}{row.direction} on {row.world}: {', '.join(ratios)}")
        row = here[0]
        texts.append(
            f"work of a rank at most {row.imbalance:.3f} of the mean, "
            f"tiles {row.tile_occupancy:.3f} full, {row.kv_bytes / MIB:.4g} MiB of K/V moved, "
            f"{row.kv_share:.3f} of all"
        )
    return "; ".join(texts)


def _memory(rows: list[RingRow]) -> str:
    """By label: MiB of each implementation on each world, and RingFA3's over ring-flash-attn's."""
    texts = []
    for label in dict.fromkeys(row.label for row in rows):
        here = sorted((row for row in rows if row.label == label), key=lambda row: row.world)
        text = f"{label}, MiB on {' / '.join(str(row.world) for row in here)} ranks"
        for name in dict.fromkeys(name for row in here for name in row.memory):
            used = [row.memory.get(name) for row in here]
            text += f", {name} " + " / ".join(_mib(x) for x in used)
            shares = [
                f"{ours / theirs:.3f}"
                for row in here
                if isinstance(ours := row.memory.get(name), int)
                and isinstance(theirs := _zigzag(row), int)
            ]
            if shares and name in _rings(here[0]):
                text += f" ({' / '.join(shares)} of {ZIGZAG})"
        texts.append(text)
    return "; ".join(texts)


def _rings(row: RingRow) -> list[str]:
    """RingFA3's implementations: the first, and others whose names begin with the same word."""
    family = row.first.split()[0]
    return [name for name in row.implementations if name.split()[0] == family]


def _zigzag(row: RingRow) -> int | str | None:
    return next((x for name, x in row.memory.items() if name.startswith(ZIGZAG)), None)


def _mib(used: int | str | None) -> str:
    return f"{used / MIB:.0f}" if isinstance(used, int) else "-"


def _errors(rows: list[RingRow]) -> str:
    """By ring: the largest error growth of each output over the cases."""
    largest: dict[str, dict[str, float]] = {}
    for row in rows:
        measured = {row.first: row.errors} | {n: c.errors for n, c in row.comparisons.items()}
        for name, errors in measured.items():
            most = largest.setdefault(name, {})
            for output, growth in row.growth(errors).items():
                most[output] = max(growth, most.get(output, 0.0))
    each = [
        f"{name} {', '.join(f'{output} {growth:.3f}' for output, growth in most.items())}"
        for name, most in largest.items()
    ]
    return f"on {rows[0].world} ranks over one, against float64: {'; '.join(each)}"


def _host(rows: list[RingRow]) -> str:
    """Microseconds on each rank."""
    texts = [
        f"{row.direction} {name} {' '.join(f'{1e6 * s:.0f}' for s in seconds)}"
        for row in rows
        for name, seconds in row.host.items()
    ]
    return f"µs to start a call, by rank: {'; '.join(texts)}"


def _checkpoint(rows: list[RingRow]) -> str:
    """By row: milliseconds and ring calls of a step, its peak MiB, and MiB before its backward."""
    texts = []
    for row in rows:
        text = f"{row.label} on {row.world}: {row.first} {figure(row.milliseconds(row.first))} ms"
        text += "".join(f", {c.ratio:.3f} of {name}" for name, c in row.comparisons.items())
        text += f", {_each(a for a, _ in row.rings.values())} rings forward"
        if row.memory:
            text += f", {_each(map(_mib, row.memory.values()))} MiB at the peak"
            text += f", {_each(map(_mib, row.retained.values()))} from forward to backward"
        texts.append(text)
    return f"{' / '.join(rows[0].implementations)}: {'; '.join(texts)}"


def _fresh(rows: list[RingRow]) -> str:
    """By row: milliseconds of a step on the same plan and on a fresh one, and their ratio."""
    texts = []
    for row in rows:
        for name, comparison in row.comparisons.items():
            times = " / ".join(figure(row.milliseconds(n)) for n in (row.first, name))
            texts.append(f"{row.label} on {row.world}: {times} ms ({comparison.ratio:.3f})")
    return f"{' / '.join(rows[0].implementations)}: {'; '.join(texts)}"


def _seeded(rows: list[RingRow]) -> str:
    """By direction, world and mix, medians over seeds: TFLOP/s, and shares of one GPU's."""
    texts = []
    batches = [(row.direction, row.world, row.label.rpartition(", ")[0]) for row in rows]
    for batch in dict.fromkeys(batches):
        here = [row for row, own in zip(rows, batches, strict=True) if own == batch]
        direction, world, mix = batch
        rates = [tflops for row in here if (tflops := row.tflops(row.first))]
        rate = figure(median(rates) if rates else None)
        text = f"{direction} on {world}, {mix}: {rate} TFLOP/s a GPU"
        for name in here[0].implementations[1:]:
            ratios = [c.ratio for row in here if (c := row.comparisons.get(name)) and c.ratio]
            if ratios:
                spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
                text += f", {median(ratios):.3f} of {name} ({spread})"
        texts.append(text)
    return "; ".join(texts)


def host_microseconds(row: RingRow, name: str) -> tuple[str, ...]:
    """Of a forward and a backward of a row of `FRESH`, on the rank with most."""
    host = (row.host[f"{name}, {direction}"] for direction in ("forward", "backward"))
    return tuple(f"{1e6 * max(seconds):.0f}" for seconds in host)


def _each(values: Iterable[object]) -> str:
    return " / ".join(map(str, values))


def _span(values: Iterable[float | None]) -> str:
    known = [x for x in values if x is not None]
    return " ".join(f"{x:.3f}" for x in known) if known else "unknown"


LINES: dict[str, Callable[[list[RingRow]], str]] = {
    LENGTHS: _lengths,
    MEMORY: _memory,
    ERROR: _errors,
    HOST: _host,
    CHECKPOINT: _checkpoint,
    FRESH: _fresh,
    MAGI: _seeded,
    MIXES: _seeded,
}
