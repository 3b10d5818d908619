"""If this fails, tables, summaries and plots of rings show other numbers than were measured.
Results of rings: JSON, tables, a line for each set, plots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringfa3.bench.common.cases import BACKWARD, FORWARD
from ringfa3.bench.common.plot import draw
from ringfa3.bench.common.results import Comparison, Results, RingRow, Row
from ringfa3.bench.ring.cases import (
    CHECKPOINT,
    ERROR,
    FRESH,
    HOST,
    LENGTHS,
    MEMORY,
    RING_SETS,
    STEPS,
    ring_case,
)
from ringfa3.bench.ring.plot import ring_figures
from ringfa3.bench.ring.summary import ring_lines
from ringfa3.bench.ring.table import ring_tables, ring_title

IMPLEMENTATIONS = ["RingFA3", "RingFA3 alone", "FA3 alone", "Ulysses on FA3"]


def match(ratio: float | None, stopped: str | None = None) -> Comparison:
    if ratio is None:
        return Comparison(stopped=stopped)
    return Comparison(
        seconds=([1.0], [ratio]),
        tflops=(600.0, 600.0 / ratio),
        ratio=ratio,
        interval=(ratio - 0.01, ratio + 0.01),
        calls=1,
        host_seconds=(2.5e-4, 1e-4),
    )


@pytest.fixture
def results() -> Results:
    rows: list[Row] = []
    for direction in (FORWARD, BACKWARD):
        for world in (4, 1):
            for make in RING_SETS.values():
                for case in make(world, 256):
                    if case.set in (MEMORY, *STEPS) and direction == FORWARD:
                        continue
                    row = RingRow.of(case, direction, "bfloat16", IMPLEMENTATIONS)
                    row.baselines = IMPLEMENTATIONS[1:3]
                    row.engine, row.transport = "kernels", "symmetric" if world > 1 else None
                    row.gathered = 5 << 20 if case.set in (LENGTHS, MEMORY) and world > 1 else None
                    row.errors, row.single_gpu_errors = {"out": 2.1e-3}, {"out": 2e-3}
                    if case.set == HOST:
                        row.host = {"RingFA3": [2.5e-4, 3e-4, 2e-4, 2e-4]}
                    if case.set == MEMORY:
                        row.memory = {"RingFA3": 3 << 30, "Ulysses on FA3": "out of memory"}
                        row.memory |= {"ring-flash-attn on FA3": 4 << 30}
                        row.retained = {"RingFA3": 1 << 30}
                    if case.set == CHECKPOINT:
                        row.implementations = ["kept", "recomputed", "stored"]
                        row.rings = {"kept": [1, 1], "recomputed": [2, 1], "stored": [1, 1]}
                        row.memory = dict.fromkeys(row.implementations, 7 << 20)
                        row.retained = dict(
                            zip(row.implementations, (4 << 20, 2 << 20, 6 << 20), strict=True)
                        )
                        row.comparisons = {"recomputed": match(1.25), "stored": match(0.75)}
                        for found in row.comparisons.values():
                            found.tflops = None
                    if case.set == FRESH:
                        row.implementations = ["the same plan again", "a fresh plan"]
                        row.comparisons = {"a fresh plan": match(2.03)}
                        row.host = {
                            f"{name}, {way}": [1e-4, 2e-4]
                            for name in row.implementations
                            for way in ("forward", "backward")
                        }
                    if case.set in (HOST, MEMORY, ERROR, *STEPS):
                        rows.append(row)
                        continue
                    row.comparisons = {
                        "RingFA3 alone": match(0.97),
                        "FA3 alone": match(0.95),
                        "Ulysses on FA3": match(1.02)
                        if world > 1 and case.set == LENGTHS
                        else match(None, "failed: no [answer] (rank 1)"),
                    }
                    rows.append(row)
    rows[1].comparisons, rows[1].stopped = {}, "wrong: out is off by 1"
    machine = {"device": "NVIDIA H200", "date": "2026-11-20"}
    return Results({}, machine, False, [], rows, True, "ring")


def test_json_and_back_is_the_same(results: Results, tmp_path: Path) -> None:
    found = Results.load(results.save(tmp_path))
    assert found == results
    assert all(isinstance(row, RingRow) for row in found.rows)


def test_the_baseline_is_the_faster_one() -> None:
    row = RingRow.of(ring_case("lengths", "16", (16,), 2), FORWARD, "bfloat16", IMPLEMENTATIONS)
    row.baselines = IMPLEMENTATIONS[1:3]
    assert row.fastest_baseline is None
    row.comparisons = {"FA3 alone": match(None, "failed"), "RingFA3 alone": match(0.97)}
    assert row.fastest_baseline is not None
    assert row.fastest_baseline[0] == "RingFA3 alone"
    row.comparisons |= {"FA3 alone": match(0.95), "Ulysses on FA3": match(0.5)}
    assert row.fastest_baseline[0] == "FA3 alone"


def test_tables_say_what_ran_and_every_row_with_figures_or_why_not(results: Results) -> None:
    every = list(ring_tables(results))
    tables = {table.columns[-1]: table for table in every}
    ran = "the ring ran on kernels and symmetric (hop by hop), kernels and symmetric (one launch)"
    forward = [row for row in results.rows if row.direction == FORWARD]
    assert ring_title(replace(results, rows=forward)) == ran
    cells = [cell for table in every for row in table.rows for cell in row]
    assert "wrong: out is off by 1" in cells
    assert "failed: no [answer] (rank 1)" in cells
    speed = tables["Ulysses on FA3, ratio [95%]"]
    row = next(row for row in speed.rows if row[1:3] == ["4", "64"])
    assert row[3:] == ["600", "0.950 [0.940, 0.960]", "588, 1.020 [1.010, 1.030]"]
    memory = tables["ring-flash-attn on FA3"].rows[0]
    assert memory[2:] == ["3072 (1024)", "out of memory", "4096 (0)"]
    fresh = next(row for row in tables["backward, µs"].rows if row[2] == "a fresh plan")
    assert fresh[:2] == ["4", "16 a GPU"]
    assert fresh[3:] == ["2030", "2.030 [2.020, 2.040]", "200", "200"]
    block = next(row for row in tables["MiB"].rows if row[2] == "recomputed")
    assert block[3:] == ["1250", "1.250 [1.240, 1.260]", "2, 1", "7 (2)"]


def test_a_set_without_baselines_has_no_column_of_them(results: Results) -> None:
    results.rows = [row for row in results.rows if row.set == "magi"]
    for row in results.rows:
        assert isinstance(row, RingRow)
        row.baselines = []
    (forward, backward) = ring_tables(results)
    assert "over single GPU [95%]" not in [*forward.columns, *backward.columns]


def test_each_set_has_a_line_at_the_end(results: Results) -> None:
    lines = {line.partition(":")[0]: line for line in ring_lines(results)}
    lengths, documents, _, error, host, *_, rest = lines.values()
    memory, block, fresh = (lines[name] for name in (MEMORY, CHECKPOINT, FRESH))
    assert lengths.startswith(
        "lengths: forward on 4: 0.950 0.950 0.950 0.950 of the single-GPU baseline, "
    )
    assert "1.020 1.020 1.020 1.020 of Ulysses on FA3" in lengths  # not of the row that stopped
    assert "; backward on 1: 0.950" in lengths
    assert documents.startswith("documents: forward on 4: 0.970 of RingFA3 alone, 0.950 of FA3 al")
    assert "tiles 1.000 full" in documents
    assert memory.startswith("memory: 16 a GPU, MiB on 4 ranks, RingFA3 3072 (0.750 of ring-flash-")
    assert "), Ulysses on FA3 -, ring-flash-attn on FA3 4096; 64 a GPU, MiB on 4 ranks, " in memory
    assert error == "error: on 4 ranks over one, against float64: RingFA3 out 1.050"
    by_rank = "RingFA3 250 300 200 200"
    assert host == f"host: µs to start a call, by rank: forward {by_rank}; backward {by_rank}"
    assert block.startswith(
        "checkpoint: kept / recomputed / stored: 16 a GPU on 4: kept 1000 ms, 1.250 of "
        "recomputed, 0.750 of stored, 1 / 2 / 1 rings forward, 7 / 7 / 7 MiB at the peak, "
        "4 / 2 / 6 from forward to backward; 64 a GPU on 4: "
    )
    assert fresh.startswith(
        "fresh: the same plan again / a fresh plan: 16 a GPU on 4: 1000 / 2030 ms (2.030); 64 a"
    )
    one_gpu = "0.970 of RingFA3 alone (0.970 to 0.970), 0.950 of FA3 alone (0.950 to 0.950); "
    assert lines["magi"].startswith(
        f"magi: forward on 4, magi, 32 a GPU: 600 TFLOP/s a GPU, {one_gpu}forward on 1, magi, 32 a"
    )
    assert "; backward on 1, tail, 128 a GPU: 600 TFLOP/s a GPU, " in lines["mixes"]
    assert rest == "1 rows without figures, the first: wrong: out is off by 1"
    results.smoke = True
    assert ring_lines(results)[0].startswith("SMOKE RUN, no kernel figures: lengths: ")


def test_plots_show_peers_and_both_scalings(results: Results, tmp_path: Path) -> None:
    from ringfa3.bench.ring.plot import scaling_panels, worlds_grid

    drawn = {path.name for path in draw(results, tmp_path, ring_figures)}
    sets = ("lengths", "scaling", "masks")
    assert drawn == {f"{d}-{s}.png" for d in (FORWARD, BACKWARD) for s in sets}
    rows = [r for r in results.rows if isinstance(r, RingRow) and r.direction == BACKWARD]
    whole = [r for r in rows if r.set == LENGTHS]
    ((four,), (one,)) = worlds_grid(whole)
    assert four.groups == one.groups == ["64", "128", "256", "512", "1k"]
    assert [s.name for s in four.series] == IMPLEMENTATIONS
    strong, weak = scaling_panels(whole)
    assert strong.groups == weak.groups == ["1", "4"]
    assert [s.label for s in weak.series] == ["64 a GPU", "128 a GPU", "256 a GPU"]
    for series in weak.series:
        assert len({sum(r.lengths) // r.world for r in series.rows if isinstance(r, RingRow)}) == 1
    for series in strong.series:
        assert len({sum(r.lengths) for r in series.rows if r}) == 1
