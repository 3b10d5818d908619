"""The page of figures: its text, and between markers the tables of the result files.

A block of the page is

    <!-- results: FOLDER [direction=...] [set=...] [world=...] [label=...] -->
    (tables of the selected rows of results/FOLDER/results.json)
    <!-- end -->

where a filter has one value or several, separated by commas. A result file with a row in no block
must be listed on the page as "* `FOLDER`: reason", so that no figure is dropped unnoticed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ringfa3.bench.common.machine import BenchError
from ringfa3.bench.common.results import FILE, Results, ResultsError, RingRow, Row
from ringfa3.bench.tables.attention import attention_block
from ringfa3.bench.tables.provenance import provenance
from ringfa3.bench.tables.ring import ring_block

BLOCK = re.compile(
    r"^<!-- results: (?P<name>\S+)(?P<filters>[^>]*?) -->\n.*?^<!-- end -->", re.S | re.M
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


def write_page(page: Path) -> int:
    """Write the page with its tables; the exit code."""
    text, fresh, missing = _render(page)
    if fresh != text:
        page.write_text(fresh)
        print(f"wrote {page}")
    return _report(missing)


def check_page(page: Path) -> int:
    """The exit code: 1, and a line for each difference, unless the page is up to date."""
    text, fresh, missing = _render(page)
    pairs = zip(BLOCK.finditer(text), BLOCK.finditer(fresh), strict=True)
    lines = [
        f"{page}: results: {old['name']} differs from its file; run python -m ringfa3.bench tables"
        for old, new in pairs
        if old[0] != new[0]
    ]
    return _report(lines + missing)


def _report(lines: list[str]) -> int:
    for line in lines:
        print(f"ringfa3.bench: {line}", file=sys.stderr)
    return 1 if lines else 0


def _render(page: Path) -> tuple[str, str, list[str]]:
    """The text of the page, the text with fresh tables, and a line for each file not covered.

    Raises BenchError for a page or a file that cannot be read.
    """
    try:
        text = page.read_text()
        files = {name: Results.load(path) for name, path in _files(page.parent / "results")}
    except (OSError, ResultsError) as error:
        raise BenchError(f"tables: {error}") from None
    shown: dict[str, set[int]] = {}

    def block(match: re.Match[str]) -> str:
        selection = Selection.parse(match["name"], match["filters"])
        if selection.name not in files:
            raise BenchError(f"results: {selection.name}: there is no such file beside {page}")
        results = files[selection.name]
        rows = [i for i, row in enumerate(results.rows) if selection.has(row)]
        if not rows:
            raise BenchError(f"results: {selection.name}{match['filters']}: selects no row")
        shown.setdefault(selection.name, set()).update(rows)
        begin = match[0].partition("\n")[0]
        return "\n".join([begin, *_block(selection.name, results, rows), "<!-- end -->"])

    fresh = BLOCK.sub(block, text)
    listed = {match["name"] for match in LISTED.finditer(text)}
    missing = [
        f"{page}: {len(results.rows) - len(shown.get(name, ()))} of {len(results.rows)} rows of "
        f"results/{name}/{FILE} are in no block, and the page does not say why"
        for name, results in files.items()
        if len(shown.get(name, ())) < len(results.rows) and name not in listed
    ]
    return text, fresh, missing


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.glob(f"*/*/{FILE}")):
        yield path.parent.relative_to(folder).as_posix(), path


def _block(name: str, results: Results, rows: list[int]) -> Iterator[str]:
    selected = replace(results, rows=[results.rows[i] for i in rows])
    yield ""
    yield from provenance(name, results, selected.rows)
    ring = any(isinstance(row, RingRow) for row in selected.rows)
    yield from (ring_block if ring else attention_block)(selected)
