"""The output of a run: progress, tables, results.json, plots, the exit code."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as TerminalTable

from ringfa3.bench.common import machine
from ringfa3.bench.common.machine import BenchError
from ringfa3.bench.common.plot import Figures, draw
from ringfa3.bench.common.results import FILE, Results, Row
from ringfa3.bench.common.table import Table, figure

WIDTH = 200  # of a table that is not on a terminal


def row_line(row: Row) -> str:
    """One line: the case, RingFA3's speed, and its ratio to each of the others."""
    name = row_name(row)
    if row.stopped:
        return f"{name}: {row.stopped}"
    ratios = [
        f"{peer} {c.ratio:.3f}" if c.ratio is not None else f"{peer} {c.stopped}"
        for peer, c in row.comparisons.items()
    ]
    return f"{name}: {figure(row.tflops(row.first))} TFLOP/s; ratio to {', '.join(ratios)}"


def row_name(row: Row) -> str:
    return f"{row.direction} {row.series} {row.mask} d{row.head_dim} {row.label}"


@dataclass(frozen=True)
class Presentation:
    """How one benchmark shows its results.

    tables   of some rows
    lines    printed at the end, without a table
    figures  for the plots
    line     of one row, while the run goes on
    title    of the tables of a set, after its name
    """

    tables: Callable[[Results], Iterator[Table]]
    lines: Callable[[Results], list[str]]
    figures: Figures
    line: Callable[[Row], str] = row_line
    title: Callable[[Results], str] = lambda results: ""


class Report:
    """The output of one run, on the rank that prints."""

    def __init__(
        self,
        results: Results,
        presentation: Presentation,
        out: Path | None,
        suffix: str,
        quiet: bool,
    ) -> None:
        """Raises BenchError where the folder cannot be created or has results."""
        self.results, self.presentation, self.quiet = results, presentation, quiet
        self.folder = new_folder(out, _stem(results, suffix), FILE)
        self.console = Console(stderr=True, quiet=quiet)
        for line in results.left_out:
            self.console.print(f"left out: {line}", soft_wrap=True, markup=False)

    @contextmanager
    def progress(self, rows: int) -> Iterator[None]:
        """A progress bar on a terminal, a line per row elsewhere."""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal or self.quiet,
        )
        self._task = self._bar.add_task(self.results.benchmark, total=rows)
        with self._bar:
            yield

    def add(self, row: Row) -> None:
        """Add a finished row, and save the results."""
        self.results.rows.append(row)
        self.results.save(self.folder)
        line = self.presentation.line(row)
        self._bar.advance(self._task)
        self._bar.update(self._task, description=line)
        if not self.console.is_terminal:
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def close(self, lost: str | None, clocks: dict[str, str]) -> int:
        """Write and print everything; returns the exit code. lost: why the run ended early."""
        results = self.results
        results.machine["after"] = clocks
        results.complete = lost is None
        lines = self.presentation.lines(results) if results.rows else []
        written = [results.save(self.folder), self._table_file(lines), *self._plots()]
        if not self.quiet:
            console = Console()
            for table in self._tables():
                (console if console.is_terminal else Console(width=WIDTH)).print(table)
            print("wrote " + ", ".join(map(str, written)))
        for line in lines:
            print(line)
        if lost:
            print(f"ringfa3.bench: stopped: {lost}", file=sys.stderr)
        return 1 if lost or any(_at_fault(row) for row in results.rows) else 0

    def _tables(self) -> Iterator[TerminalTable]:
        """For each set."""
        for name in dict.fromkeys(row.set for row in self.results.rows):
            rows = [row for row in self.results.rows if row.set == name]
            here = replace(self.results, rows=rows)
            compared = f"ratio above 1: {rows[0].first} is faster"
            compared *= any(row.comparisons for row in rows)
            words = (name, rows[0].dtype, compared, self.presentation.title(here))
            for table in self.presentation.tables(here):
                yield table.terminal(", ".join(filter(None, words)), here)

    def _table_file(self, lines: list[str]) -> Path:
        """The tables and the lines below them, as text."""
        path = self.folder / "table.txt"
        with path.open("w") as file:
            console = Console(file=file, width=WIDTH)
            for table in self._tables():
                console.print(table)
            for line in lines:
                console.print(line, soft_wrap=True, markup=False, highlight=False)
        return path

    def _plots(self) -> list[Path]:
        try:
            return draw(self.results, self.folder, self.presentation.figures)
        except ModuleNotFoundError as error:
            text = f"no plots: {error}; pip install 'ringfa3\\[bench]', then --plot-only"
            self.console.print(text)
            return []


def _stem(results: Results, suffix: str) -> Path:
    """The default folder of results."""
    root = Path("runs/bench" if results.smoke else "docs/results")
    day = datetime.datetime.now(datetime.timezone.utc).date()
    name = "cpu-smoke" if results.smoke else machine.slug(results.machine["device"])
    return root / results.benchmark / f"{name}-{day}{suffix}"


def new_folder(out: Path | None, stem: Path, file: str) -> Path:
    """The folder `out`, else `stem` or `stem` with a number, created; never one that has `file`.

    Raises BenchError: `out` has it, or cannot be created.
    """
    folder, number = out or stem, 1
    if out is not None and (out / file).exists():
        raise BenchError(f"--out {out} has results already: give another folder")
    while (folder / file).exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out {folder}: {error.strerror}") from None
    return folder


def _at_fault(row: Row) -> bool:
    """Whether a result was wrong, or a call failed."""
    stopped = [row.stopped, *(c.stopped for c in row.comparisons.values())]
    return any(s is not None and s.startswith(("wrong", "failed")) for s in stopped)
