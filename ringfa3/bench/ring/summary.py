"""What a run of rings comes to: a line for each set."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ringfa3.bench.common.cases import CHECKPOINT, ERROR, HOST, LENGTHS, MEMORY
from ringfa3.bench.common.results import Results, RingRow
from ringfa3.bench.common.table import figure
from ringfa3.bench.ring.implementations import ZIGZAG

MIB = 1 << 20


def ring_lines(results: Results) -> list[str]:
    """By set, in the order in which they were measured; and how many rows have no figures."""
    rows = ring_rows(results)
    label = "SMOKE RUN, no kernel figures: " if results.smoke else ""
    lines = []
    for name in dict.fromkeys(row.set for row in rows):
        here = [row for row in rows if row.set == name and not row.stopped]
        said = LINES.get(name, masks_line)(here) if here else ""
        lines.append(f"{label}{name}: {said or 'no row was measured'}")
    if stopped := [row for row in rows if row.stopped]:
        lines.append(f"{len(stopped)} rows without figures, the first: {stopped[0].stopped}")
    return lines


def ring_rows(results: Results) -> list[RingRow]:
    return [row for row in results.rows if isinstance(row, RingRow)]


def _lengths(rows: list[RingRow]) -> str:
    """Of each direction and world: the share of the yardstick, and the speed over the peers'."""
    said = []
    for direction, world in dict.fromkeys((row.direction, row.world) for row in rows):
        here = [row for row in rows if (row.direction, row.world) == (direction, world)]
        shares = [row.of_yardstick[1].ratio for row in here if row.of_yardstick]
        text = f"{direction} on {world}: {_span(shares)} of the yardstick"
        peers = dict.fromkeys(
            name for row in here for name in row.lineup[1:] if name not in row.yardsticks
        )
        for name in peers:
            ratios = [m.ratio for row in here if (m := row.matches.get(name)) and m.ratio]
            text += f", {_span(ratios)} of {name}" if ratios else ""
        said.append(text)
    return "; ".join(said)


def masks_line(rows: list[RingRow]) -> str:
    """Of each direction, against every other; and how the plan spreads the case."""
    said = []
    for row in rows:
        ratios = [f"{m.ratio:.3f} of {name}" for name, m in row.matches.items() if m.ratio]
        said.append(f"{row.direction} on {row.world}: {', '.join(ratios)}")
    row = rows[0]
    said.append(
        f"work of a rank at most {row.imbalance:.3f} of the mean, tiles {row.fullness:.3f} full, "
        f"{row.kv_bytes / MIB:.3g} MiB of K/V moved, {row.kv_share:.3f} of all"
    )
    return "; ".join(said)


def _memory(rows: list[RingRow]) -> str:
    """Of each label: everybody's MiB on each world, and the share of ring-flash-attn's."""
    said = []
    for label in dict.fromkeys(row.label for row in rows):
        here = sorted((row for row in rows if row.label == label), key=lambda row: row.world)
        text = f"{label}, MiB on {' / '.join(str(row.world) for row in here)} ranks"
        for name in dict.fromkeys(name for row in here for name in row.memory):
            held = [row.memory.get(name) for row in here]
            text += f", {name} " + " / ".join(_mib(x) for x in held)
            shares = [
                f"{mine / its:.3f}"
                for row in here
                if isinstance(mine := row.memory.get(name), int)
                and isinstance(its := _zigzag(row), int)
            ]
            if shares and name in _rings(here[0]):
                text += f" ({' / '.join(shares)} of {ZIGZAG})"
        said.append(text)
    return "; ".join(said)


def _rings(row: RingRow) -> list[str]:
    """RingFA3's own of a line-up: the first, and others named like it."""
    family = row.first.split()[0]
    return [name for name in row.lineup if name.split()[0] == family]


def _zigzag(row: RingRow) -> int | str | None:
    return next((x for name, x in row.memory.items() if name.startswith(ZIGZAG)), None)


def _mib(held: int | str | None) -> str:
    return f"{held / MIB:.0f}" if isinstance(held, int) else "-"


def _errors(rows: list[RingRow]) -> str:
    """The largest growth of each output over cases, of each ring."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        measured = {row.first: row.errors} | {n: m.errors for n, m in row.matches.items()}
        for name, errors in measured.items():
            most = found.setdefault(name, {})
            for output, growth in row.growth(errors).items():
                most[output] = max(growth, most.get(output, 0.0))
    each = [
        f"{name} {', '.join(f'{output} {growth:.3f}' for output, growth in most.items())}"
        for name, most in found.items()
    ]
    return f"on {rows[0].world} ranks over one, against float64: {'; '.join(each)}"


def _host(rows: list[RingRow]) -> str:
    """Microseconds on each rank."""
    said = [
        f"{row.direction} {name} {' '.join(f'{1e6 * s:.0f}' for s in seconds)}"
        for row in rows
        for name, seconds in row.host.items()
    ]
    return f"µs to start a call, by rank: {'; '.join(said)}"


def _checkpoint(rows: list[RingRow]) -> str:
    """Of each row: milliseconds of a step, the rings in it, MiB at its peak and held in it."""
    said = []
    for row in rows:
        text = f"{row.label} on {row.world}: {row.first} {figure(row.milliseconds(row.first))} ms"
        text += "".join(f", {m.ratio:.3f} of {name}" for name, m in row.matches.items())
        text += f", {_each(a for a, _ in row.rings.values())} rings forward"
        if row.memory:
            text += f", {_each(map(_mib, row.memory.values()))} MiB at the peak"
            text += f", {_each(map(_mib, row.kept.values()))} from forward to backward"
        said.append(text)
    return f"{' / '.join(rows[0].lineup)}: {'; '.join(said)}"


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
}
