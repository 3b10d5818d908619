"""If this fails, stored results cannot be read again, or tables and plots show other numbers.
Results: JSON and back, tables, plots, and the line at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ringfa3.bench.__main__ import plot_only
from ringfa3.bench.attention.cases import select
from ringfa3.bench.attention.plot import attention_figures
from ringfa3.bench.attention.run import PRESENTATION
from ringfa3.bench.attention.table import attention_lines, attention_tables
from ringfa3.bench.common.cases import FORWARD, Case
from ringfa3.bench.common.plot import draw
from ringfa3.bench.common.report import Report
from ringfa3.bench.common.results import (
    FASTER,
    PLAIN,
    Comparison,
    Results,
    ResultsError,
    Row,
    summaries,
    summary_line,
)
from ringfa3.bench.common.table import SMOKE, Table

IMPLEMENTATIONS = ["RingFA3", "FA3", "cuDNN"]


def match(tflops: float, ratio: float) -> Comparison:
    """A at `tflops`, `ratio` times B's."""
    seconds = 1 / tflops
    return Comparison(
        seconds=([seconds] * 10, [seconds * ratio] * 10),
        tflops=(tflops, tflops / ratio),
        ratio=ratio,
        interval=(ratio - 0.01, ratio + 0.01),
        calls=4,
        host_seconds=(1e-5, 1e-5),
        host_bound=(tflops == 512, False),
        errors={"out": 1e-3},
        differences={"out": 2e-3},
    )


def measured(cases: list[Case], ratio: float = 0.9) -> list[Row]:
    rows = []
    for i, case in enumerate(cases):
        row = Row.of(case, FORWARD, "bfloat16", IMPLEMENTATIONS)
        row.errors, row.allowed = {"out": 1e-3}, {"out": 4e-3}
        row.comparisons = {
            "FA3": match(512 + 7 * i, ratio + 0.01 * i),
            "cuDNN": Comparison(stopped="refused: no [window]")
            if case.packed
            else match(500 + 7 * i, 1.2),
        }
        row.clocks = {"clocks.sm": "1755 MHz"}
        rows.append(row)
    return rows


@pytest.fixture
def results() -> Results:
    """All sets at a 256th of their size; the second row out of memory."""
    found = Results(
        settings={"pairs": 10},
        machine={"device": "NVIDIA H200", "date": "2026-11-20T10:00:00+00:00", "torch": "2.11.0"},
        smoke=False,
        left_out=["backward"],
        rows=measured(select(["paper", "gqa", "masks"], shrink=256)),
        complete=True,
    )
    found.rows[1].comparisons, found.rows[1].stopped = {}, "out of memory"
    return found


def printed(results: Results) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for table in attention_tables(results):
            console.print(table.terminal("attention", results))
    return captured.get()


def page_of(results: Results) -> str:
    return "\n".join(line for table in attention_tables(results) for line in table.markdown())


def test_json_and_back_is_the_same(results: Results, tmp_path: Path) -> None:
    path = results.save(tmp_path)
    assert Results.load(path) == results
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    content = json.loads(path.read_text())
    assert content["rows"][1]["stopped"] == "out of memory"
    assert content["summary"][0]["geometric_mean"] == summaries(results)[0].geometric_mean


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result"),
        ('{"benchmark": "attention", "format": 99}', "has format 99"),
    ],
)
def test_a_file_of_another_kind_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ResultsError, match=message):
        Results.load(tmp_path / "x.json")


def test_the_table_has_every_row_with_figures_or_why_not(results: Results) -> None:
    lines = printed(results).splitlines()
    first, second = (next(line for line in lines if f"│ {n} x " in line) for n in (2, 4))
    assert "512*" in first  # host-bound
    assert "0.900 [0.890, 0.910]" in first
    assert "1.200 [1.190, 1.210]" in first
    assert "out of memory" in second
    assert "no [window]" in printed(results)
    assert "device times" in printed(results)
    for row in results.rows:
        assert any(row.label in line for line in lines)


def test_geometric_means_by_set_and_head_dim(results: Results) -> None:
    found = {(s.set, s.head_dim, s.peer): s for s in summaries(results)}
    assert set(found) == {
        (group, d, peer)
        for peer in IMPLEMENTATIONS[1:]
        for group, d in (
            ("paper", 64),
            ("paper", 128),
            ("paper", 256),
            ("gqa", 128),
            ("masks", 128),
        )
    }
    ratios = [0.9 + 0.01 * i for i in range(12) if i != 1]
    d64 = found["paper", 64, "FA3"]
    assert d64.geometric_mean == pytest.approx(math.prod(ratios) ** (1 / 11))
    assert (d64.rows, d64.worst, d64.worst_row) == (11, 0.9, "full 2 x 32")
    masks = [r for r in results.rows if r.set == "masks"]
    assert found["masks", 128, "FA3"].rows == len(masks) / 2  # without the causal sequences


@pytest.fixture
def both() -> Results:
    """FA3 1.2 to 1.3 of a row's speed, FA4 from 1.5 down to 1.0; it refuses the last row."""
    rows = measured(select(["gqa"], shrink=256), 1.2)
    for i, row in enumerate(rows):
        row.implementations = ["RingFA3", "FA3", "FA4"]
        row.comparisons["FA4"] = match(500, 1.5 - 0.05 * i)
        del row.comparisons["cuDNN"]
    rows[-1].comparisons["FA4"] = Comparison(stopped="refused: no such tile")
    return Results({"pairs": 10}, {"device": "NVIDIA H200"}, False, [], rows)


def test_the_peer_is_the_faster_of_both_row_by_row(both: Results) -> None:
    ratios = []
    for i, row in enumerate(both.rows):
        found = row.comparison(FASTER)
        assert found is not None
        ratios.append(found.ratio)
        alone = i == len(both.rows) - 1
        assert found.ratio == 1.2 + 0.01 * i if alone else min(1.2 + 0.01 * i, 1.5 - 0.05 * i)
    assert both.rows[0].comparison(FASTER) is both.rows[0].comparisons["FA3"]
    assert both.rows[7].comparison(FASTER) is both.rows[7].comparisons["FA4"]
    found = {s.peer: s for s in summaries(both)}
    assert list(found) == [FASTER, "FA3", "FA4"]
    assert [s.rows for s in found.values()] == [10, 10, 9]
    assert found[FASTER].geometric_mean == pytest.approx(math.prod(ratios) ** 0.1)
    assert found[FASTER].worst == min(ratios)
    assert attention_lines(both)[0].startswith(f"RingFA3 / {FASTER}, geometric means: forward gqa")


def test_the_peer_is_in_the_tables(both: Results) -> None:
    page = page_of(both)
    assert f"RingFA3 / {FASTER}, geometric mean" in page
    assert "| no such tile |" in page
    worst = min(s.worst for s in summaries(both))
    assert f" | {worst:.3f} (causal" in page
    assert f"{FASTER}, ratio [95%]" in page
    row = both.rows[7]
    cell = f"| {row.comparisons['FA4'].ratio:.3f} [{row.comparisons['FA4'].ratio - 0.01:.3f}, "
    assert page.count(cell) == 1  # of the faster one; FA4's own has its TFLOP/s before it


def test_without_one_of_them_there_is_no_faster_one(results: Results) -> None:
    assert results.rows[0].comparison(FASTER) is None
    assert FASTER not in {s.peer for s in summaries(results)}
    assert FASTER not in printed(results)


def test_errors_stand_beside_the_ratios(both: Results, tmp_path: Path) -> None:
    for row in both.rows:
        row.rms = {"RingFA3": {"out": 1.2e-4}, "FA3": {"out": 1e-4}, PLAIN: {"out": 4e-4}}
    both.rows[3].rms["FA3"] = {"out": math.inf}
    both.rows[4].rms["RingFA3"] = {"out": 1.32e-4}
    assert attention_lines(both)[1].startswith("largest rms error over that of FA3: 1.320 (out, ")
    page = page_of(both)
    assert "error / FA3: out" in page
    assert "| 1.32 (out, full 512) | 0.33 (out, full 512) |" in page
    assert page.count(" | 1.20 | 0.30 |") == 8
    assert page.count(" | – | 0.30 |") == 1
    both.save(tmp_path)
    assert Results.load(tmp_path / "results.json").rows[4].rms == both.rows[4].rms


def test_other_implementations_have_a_table_of_their_own(results: Results) -> None:
    results.rows[-1].implementations = ["RingFA3", "without overlap"]
    assert [len(table.columns) for table in attention_tables(results)] == [7, 8, 7]


@pytest.mark.parametrize(
    ("cell", "colour"),
    [
        ("588, 1.020 [1.010, 1.030]", "\x1b[32m"),  # green
        ("0.950 [0.940, 0.960]", "\x1b[33m"),  # yellow
        ("1.000 [0.990, 1.010]", ""),
        ("wrong: out is off", "\x1b[31m"),  # red
    ],
)
def test_the_terminal_shows_who_is_faster(cell: str, colour: str, results: Results) -> None:
    console = Console(width=80, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(Table(["ratio"], [[cell]]).terminal("", results))
    assert f"{colour}{cell}" in captured.get()
    assert ("\x1b[3" in captured.get().partition("┡")[2]) is bool(colour)


def test_the_line_at_the_end_names_the_worst_row(results: Results) -> None:
    line = summary_line(results, "FA3")
    assert "\n" not in line
    assert line.startswith("RingFA3 / FA3, geometric means: forward paper d64 0.9")
    assert "worst 0.900 (forward d64 full 2 x 32)" in line
    assert line.endswith("; 1 rows without figures")
    assert summary_line(results, "nobody") == "no row against nobody was measured"


def test_a_report_has_the_tables_of_each_set(results: Results, tmp_path: Path) -> None:
    """In order, with the rows of that set alone."""

    def tables(of_set: Results) -> Iterator[Table]:
        yield Table([of_set.rows[0].set], [[f"{row.set} {row.label}"] for row in of_set.rows])

    presentation = replace(PRESENTATION, tables=tables, figures=lambda results: iter(()))
    Report(results, presentation, tmp_path / "report", "", quiet=True).close(None, {})
    lines = (tmp_path / "report" / "table.txt").read_text().splitlines()
    rows = [line.strip("│ ") for line in lines if line.startswith("│")]
    assert rows == [f"{row.set} {row.label}" for row in results.rows]
    columns = [line.strip("┃ ") for line in lines if line.startswith("┃")]
    assert columns == list(dict.fromkeys(row.set for row in results.rows))


def test_a_smoke_run_says_so_everywhere(results: Results, tmp_path: Path) -> None:
    results.smoke = True
    assert SMOKE in printed(results)
    assert summary_line(results, "FA3").startswith("SMOKE RUN, no kernel figures: ")
    assert json.loads(results.save(tmp_path).read_text())["smoke"] is True


def test_plots_are_drawn_and_redrawn_from_json(results: Results, tmp_path: Path) -> None:
    drawn = draw(results, tmp_path, attention_figures)
    names = ["forward-paper.png", "forward-gqa.png", "forward-masks.png"]
    assert [path.name for path in drawn] == names
    first = [path.read_bytes() for path in drawn]
    assert all(image.startswith(b"\x89PNG") for image in first)
    results.save(tmp_path)
    for path in drawn:
        path.unlink()
    assert plot_only(tmp_path / "results.json") == 0
    assert [path.read_bytes() for path in drawn] == first


def test_bars_carry_their_figures_and_what_stopped_them(results: Results) -> None:
    from matplotlib.figure import Figure

    from ringfa3.bench.attention.plot import masks_grid, shapes_grid
    from ringfa3.bench.common.plot import draw_bars

    paper = [row for row in results.rows if row.set == "paper"]
    grid = shapes_grid(paper)
    assert [len(line) for line in grid] == [3, 3]
    axes = Figure().subplots()
    draw_bars(axes, grid[0][0])
    written = [text.get_text() for text in axes.texts]
    assert written[:2] == ["512", "OOM"]
    assert len(written) == 18
    heights = [bar.get_height() for bar in axes.patches]
    assert heights[0] == 512
    assert heights[1] == 0

    masks = [row for row in results.rows if row.set == "masks"]
    ((panel,),) = masks_grid(masks)
    assert [s.name for s in panel.series] == IMPLEMENTATIONS + IMPLEMENTATIONS
    for series in panel.series[3:]:
        assert [row.equal_flops_of for row in series.rows if row] == [
            row.label for row in masks if row.equal_flops_of is None
        ]
