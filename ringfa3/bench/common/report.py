"""What a run says and leaves behind: progress, tables, results.json, plots, the exit code."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ringfa3.bench.common import machine, plot
from ringfa3.bench.common.implementations import FA3
from ringfa3.bench.common.machine import BenchError
from ringfa3.bench.common.results import FILE, Results, RingRow, Row, one_line, summaries
from ringfa3.bench.common.table import attention_tables, figure
from ringfa3.bench.ring.summary import LINES, masks_line, ring_lines
from ringfa3.bench.ring.table import ring_tables

WIDTH = 160  # of a table that no terminal shows
TABLES = {"attention": attention_tables, "ring": ring_tables}


class Report:
    """Of one run, on the one rank that speaks."""

    def __init__(self, results: Results, out: Path | None, suffix: str, quiet: bool) -> None:
        """Raises BenchError where the folder cannot be had."""
        self.results, self.quiet = results, quiet
        self.folder = _folder(results, out, suffix)
        self.console = Console(stderr=True, quiet=quiet)
        for line in results.left_out:
            self.console.print(f"left out: {line}", soft_wrap=True, markup=False)

    @contextmanager
    def progress(self, rows: int) -> Iterator[None]:
        """A bar on a terminal, a line per row elsewhere."""
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
        """A row is done, and saved."""
        self.results.rows.append(row)
        self.results.save(self.folder)
        line = _line(row)
        self._bar.advance(self._task)
        self._bar.update(self._task, description=line)
        if not self.console.is_terminal:
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def close(self, lost: str | None, clocks: dict[str, str]) -> int:
        """The end, and the exit code; `lost` says what ended the run before its time."""
        results = self.results
        results.machine["after"] = clocks
        results.complete = lost is None
        lines = []
        if results.rows:
            ring = results.benchmark == "ring"
            lines = ring_lines(results) if ring else [_attention_line(results)]
        written = [results.save(self.folder), self._tables(lines), *self._plots()]
        if not self.quiet:
            console = Console()
            for table in TABLES[results.benchmark](results):
                (console if console.is_terminal else Console(width=WIDTH)).print(table)
            print("wrote " + ", ".join(map(str, written)))
        for line in lines:
            print(line)
        if lost:
            print(f"ringfa3.bench: stopped: {lost}", file=sys.stderr)
        return 1 if lost or any(_at_fault(row) for row in results.rows) else 0

    def _tables(self, lines: list[str]) -> Path:
        """The tables and the lines below them, as text."""
        path = self.folder / "table.txt"
        with path.open("w") as file:
            console = Console(file=file, width=WIDTH)
            for table in TABLES[self.results.benchmark](self.results):
                console.print(table)
            for line in lines:
                console.print(line, soft_wrap=True, markup=False, highlight=False)
        return path

    def _plots(self) -> list[Path]:
        try:
            return plot.draw(self.results, self.folder)
        except ModuleNotFoundError as error:
            said = f"no plots: {error}; pip install 'ringfa3\\[bench]', then --plot-only"
            self.console.print(said)
            return []


def _folder(results: Results, out: Path | None, suffix: str) -> Path:
    """Where results go, made. Never a folder that has some."""
    if out is not None:
        folder = out
        if (folder / FILE).exists():
            raise BenchError(f"--out {folder} has results already: give another folder")
    else:
        root = Path("runs/bench" if results.smoke else "docs/results")
        day = datetime.datetime.now(datetime.timezone.utc).date()
        name = "cpu-smoke" if results.smoke else machine.slug(results.machine["device"])
        stem = root / results.benchmark / f"{name}-{day}{suffix}"
        folder, number = stem, 1
        while (folder / FILE).exists():
            number += 1
            folder = stem.with_name(f"{stem.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out {folder}: {error.strerror}") from None
    return folder


def _line(row: Row) -> str:
    name = f"{row.direction} {row.series} {row.mask} d{row.head_dim} {row.label}"
    if row.stopped:
        return f"{name}: {row.stopped}"
    if isinstance(row, RingRow) and not row.head:
        return f"{name}: {LINES.get(row.set, masks_line)([row])}"
    said = [
        f"{peer} {match.ratio:.3f}" if match.ratio is not None else f"{peer} {match.stopped}"
        for peer, match in row.matches.items()
    ]
    return f"{name}: {figure(row.tflops(row.first))} TFLOP/s; ratio to {', '.join(said)}"


def _attention_line(results: Results) -> str:
    """About FA3, or the first peer with figures, or who took part."""
    peers = [s.peer for s in summaries(results)] or results.rows[0].lineup[1:]
    return one_line(results, FA3 if FA3 in peers else peers[0])


def _at_fault(row: Row) -> bool:
    """Whether somebody's result was wrong, or a call failed."""
    stopped = [row.stopped, *(match.stopped for match in row.matches.values())]
    return any(s is not None and s.startswith(("wrong", "failed")) for s in stopped)
