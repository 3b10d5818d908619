"""Tables of figures, which the terminal and the pages in docs/ share, and their cells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table as TerminalTable
from rich.text import Text

from ringfa3.bench.common.results import Comparison, Results, Row

SMOKE = "SMOKE RUN on the CPU with the PyTorch fallback: no figure here is that of a kernel"
HOST_BOUND = (
    "* the host takes longer to start a call than the device to run it; these are device times"
)
INTERVAL = re.compile(r"\[([\d.]+), ([\d.]+)\]")
STOPPED = ("wrong", "failed", "out of memory")


@dataclass(frozen=True)
class Table:
    """Cells by row, below `columns`.

    left    columns that are aligned left: the first ones; the others are aligned right
    note    lines of prose
    folded  a title: a page shows the table only where a reader unfolds it
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    note: Sequence[str] = ()
    folded: str | None = None

    def markdown(self) -> Iterator[str]:
        """Its lines in a page."""
        if self.folded:
            yield from (f"<details><summary>{self.folded}</summary>", "")
        if self.note:
            yield from (*self.note, "")
        yield "| " + " | ".join(self.columns) + " |"
        alignment = ("---" if i < self.left else "--:" for i in range(len(self.columns)))
        yield "|" + "|".join(alignment) + "|"
        for row in self.rows:
            yield "| " + " | ".join(row) + " |"
        yield ""
        if self.folded:
            yield from ("</details>", "")

    def terminal(self, title: str, results: Results) -> TerminalTable:
        """The table of some rows, as rich prints it."""
        found = TerminalTable(
            title=" ".join([f"{title}.", *self.note]) if self.note else title,
            caption=caption(results),
            caption_style="bold red" if results.smoke else "dim",
        )
        for i, column in enumerate(self.columns):
            found.add_column(Text(column), justify="left" if i < self.left else "right")
        for row in self.rows:
            found.add_row(*map(_coloured, row))
        return found


def caption(results: Results) -> str | None:
    bound = any(any(c.host_bound) for row in results.rows for c in row.comparisons.values())
    lines = [SMOKE] * results.smoke + [HOST_BOUND] * bound
    return "\n".join(lines) or None


def _coloured(cell: str) -> Text:
    """Green where the first implementation is faster, yellow where the other is; red: stopped."""
    found = INTERVAL.search(cell)
    low, high = map(float, found.groups()) if found else (1.0, 1.0)
    stopped = "red" if cell.startswith(STOPPED) else ""
    return Text(cell, "green" if low > 1 else "yellow" if high < 1 else stopped)


def figure(tflops: float | None, mark: str = "") -> str:
    """At least three digits."""
    if tflops is None:
        return "–"
    return f"{tflops:.0f}{mark}" if tflops >= 100 else f"{tflops:.3g}{mark}"


def speed(row: Row, name: str) -> str:
    """TFLOP/s of an implementation, "*" where the host is slower than the device."""
    timed = row.first_timed if name == row.first else row.comparisons.get(name)
    bound = timed and timed.host_bound[name != row.first]
    return figure(row.tflops(name), "*" if bound else "")


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
