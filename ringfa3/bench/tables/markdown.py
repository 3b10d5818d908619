"""Tables in Markdown, and the cells that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringfa3.bench.common.results import Comparison, Row
from ringfa3.bench.common.table import figure


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """The first `left` columns are aligned left, the others right."""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "|".join("---" if i < left else "--:" for i in range(len(columns))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def folded(title: str, lines: Iterator[str]) -> Iterator[str]:
    """Lines that a reader unfolds."""
    yield f"<details><summary>{title}</summary>"
    yield ""
    yield from lines
    yield "</details>"
    yield ""


def speed(row: Row, name: str) -> str:
    """TFLOP/s of an implementation, "*" where the host is slower than the device."""
    if name == row.first:
        timed = row.first_timed
        return figure(row.tflops(name), "*" if timed and timed.host_bound[0] else "")
    comparison = row.comparisons.get(name)
    return figure(row.tflops(name), "*" if comparison and comparison.host_bound[1] else "")


def ratio(comparison: Comparison | None) -> str:
    """The ratio with its 95% interval, or why there is none."""
    if comparison is None:
        return ""
    if comparison.ratio is None or comparison.interval is None:
        return (comparison.stopped or "–").removeprefix("refused: ")
    low, high = comparison.interval
    return f"{comparison.ratio:.3f} [{low:.3f}, {high:.3f}]"


def peer(row: Row, name: str) -> str:
    """Speed and ratio of another implementation in one cell."""
    comparison = row.comparisons.get(name)
    if comparison is None or comparison.tflops is None:
        return ratio(comparison)
    return f"{speed(row, name)}, {ratio(comparison)}"
