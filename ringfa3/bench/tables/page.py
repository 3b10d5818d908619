"""The pages of figures: their text, and between markers the tables of the result files.

A block of a page is one of

    <!-- results: FOLDER [direction=...] [set=...] [world=...] [label=...] -->
    (tables of the selected rows of results/FOLDER/results.json)
    <!-- end -->

    <!-- gains: FOLDER ... -->      speed over other libraries, a line for each set and head dim
    <!-- runs: BENCHMARK -->        a line for each result file of `attention` or `ring`

where a filter has one value or several, separated by commas. A result file with a row in no block
`results` must be listed on a page as "* `FOLDER`: reason", so that no figure is dropped unnoticed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ringfa3.bench.attention.table import attention_tables
from ringfa3.bench.common.machine import BenchError
from ringfa3.bench.common.results import FILE, Results, ResultsError, RingRow, Row
from ringfa3.bench.ring.table import ring_tables
from ringfa3.bench.tables.overview import gains, runs
from ringfa3.bench.tables.provenance import provenance

BLOCK = re.compile(
    r"^<!-- (?P<block>(?P<content>results|gains|runs): (?P<name>\S+)(?P<rest>[^>]*?)) -->\n"
    r".*?^<!-- end -->",
    re.S | re.M,
)
LISTED = re.compile(r"^\* `(?P<name>\S+)`: ", re.M)
FILTERS = ("direction", "set", "world", "label")


@dataclass(frozen=True)
class Selection:
    """The rows of a result file whose attributes have one of the given values."""

    name: str
    filters: dict[str, list[str]]

    @classmethod
    def parse(cls, name: str, text: str) -> Selection:
        """Raises BenchError for an unknown filter."""
        filters = {}
        for word in text.split():
            key, _, values = word.partition("=")
            if key not in FILTERS or not values:
                known = ", ".join(f"{f}=..." for f in FILTERS)
                raise BenchError(f"results: {name}: unknown filter {word}; known are {known}")
            filters[key] = values.split(",")
        return cls(name, filters)

    def has(self, row: Row) -> bool:
        return all(str(getattr(row, key, 1)) in values for key, values in self.filters.items())


@dataclass
class Pages:
    """All pages below a folder that have blocks, and the result files in its folder results/.

    files  by the name of their folder below results/
    shown  the rows of each file that a block `results` shows
    """

    folder: Path
    files: dict[str, Results]
    shown: dict[str, set[int]]

    @classmethod
    def load(cls, folder: Path) -> Pages:
        """Raises BenchError for a result file that cannot be read."""
        results = folder / "results"
        try:
            files = {
                path.parent.relative_to(results).as_posix(): Results.load(path)
                for path in sorted(results.glob(f"*/*/{FILE}"))
            }
        except (OSError, ResultsError) as error:
            raise BenchError(f"tables: {error}") from None
        return cls(folder, files, {name: set() for name in files})

    def render(self) -> Iterator[tuple[Path, str, str]]:
        """Each page, its text, and its text with fresh tables. Raises BenchError if none has."""
        texts = {path: path.read_text() for path in sorted(self.folder.rglob("*.md"))}
        texts = {path: text for path, text in texts.items() if BLOCK.search(text)}
        if not texts:
            raise BenchError(f"tables: no page in {self.folder} has a block of results")
        for path, text in texts.items():
            base = os.path.relpath(self.folder / "results", path.parent)
            yield path, text, BLOCK.sub(partial(self._block, base), text)

    def missing(self) -> list[str]:
        """A line for each file with rows in no block, unless a page lists it."""
        texts = [path.read_text() for path in self.folder.rglob("*.md")]
        listed = {match["name"] for text in texts for match in LISTED.finditer(text)}
        return [
            f"{len(results.rows) - len(self.shown[name])} of {len(results.rows)} rows of "
            f"results/{name}/{FILE} are in no block, and no page in {self.folder} says why"
            for name, results in self.files.items()
            if len(self.shown[name]) < len(results.rows) and name not in listed
        ]

    def _block(self, base: str, match: re.Match[str]) -> str:
        """A block with fresh tables; `base`: the path to results/ from its page."""
        lines = getattr(self, f"_{match['content']}")(match["name"], match["rest"], base)
        return "\n".join([match[0].partition("\n")[0], "", *lines, "<!-- end -->"])

    def _results(self, name: str, filters: str, base: str) -> Iterator[str]:
        selection = Selection.parse(name, filters)
        results = self._file(name)
        rows = [i for i, row in enumerate(results.rows) if selection.has(row)]
        if not rows:
            raise BenchError(f"results: {name}{filters}: selects no row")
        self.shown[name].update(rows)
        selected = replace(results, rows=[results.rows[i] for i in rows])
        yield from provenance(name, results, selected.rows, base)
        ring = any(isinstance(row, RingRow) for row in selected.rows)
        for table in (ring_tables if ring else attention_tables)(selected):
            yield from table.markdown()

    def _gains(self, name: str, names: str, base: str) -> Iterator[str]:
        return gains([self._file(name) for name in [name, *names.split()]])

    def _runs(self, benchmark: str, rest: str, base: str) -> Iterator[str]:
        known = {results.benchmark for results in self.files.values()}
        if benchmark not in known or rest.strip():
            raise BenchError(f"runs: {benchmark}{rest}: give one of {', '.join(sorted(known))}")
        return runs({n: r for n, r in self.files.items() if r.benchmark == benchmark}, base)

    def _file(self, name: str) -> Results:
        if name not in self.files:
            raise BenchError(f"{name}: there is no such file in {self.folder}/results")
        return self.files[name]


def write_pages(folder: Path) -> int:
    """Write the pages with their tables; the exit code."""
    pages = Pages.load(folder)
    for path, text, fresh in list(pages.render()):  # all, before the first is written
        if fresh != text:
            path.write_text(fresh)
            print(f"wrote {path}")
    return _report(pages.missing())


def check_pages(folder: Path) -> int:
    """The exit code: 1, and a line for each difference, unless the pages are up to date."""
    pages = Pages.load(folder)
    lines = [
        f"{path}: {old['block']} differs from its file; run python -m ringfa3.bench tables"
        for path, text, fresh in pages.render()
        for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(fresh), strict=True)
        if old[0] != new[0]
    ]
    return _report(lines + pages.missing())


def _report(lines: list[str]) -> int:
    for line in lines:
        print(f"ringfa3.bench: {line}", file=sys.stderr)
    return 1 if lines else 0
