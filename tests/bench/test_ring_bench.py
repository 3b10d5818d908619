"""The command, `python -m ringfa3.bench ring`: a job under torchrun, and what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense import mask
from rich.console import Console

from ringfa3.bench import memory, ring
from ringfa3.bench.__main__ import main
from ringfa3.bench.cases import (
    BACKWARD,
    ERROR,
    FORWARD,
    HOST,
    LENGTHS,
    MEMORY,
    RING_SETS,
    RingCase,
    ring_case,
)
from ringfa3.bench.contest import DeviceLostError
from ringfa3.bench.memory import Held, Scales
from ringfa3.bench.plot import draw
from ringfa3.bench.results import Match, Results, RingRow, Row
from ringfa3.bench.ring_summary import ring_lines
from ringfa3.bench.ring_table import ring_tables
from ringfa3.bench.spread import Spread
from ringfa3.context import plan_context

LINEUP = ["RingFA3", "RingFA3 alone", "FA3 alone", "Ulysses on FA3"]


def torchrun(ranks: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "ringfa3.bench", "ring", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=env
    )


def test_a_job_of_two_ranks_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = torchrun(2, "--device", "cpu", "--longest", "32768", "--shortest", "32768", "--out", out)
    assert done.returncode == 0, done.stderr
    rows = [x for x in done.stderr.splitlines() if x.startswith(("forward", "backward"))]
    assert len(rows) == 4  # of two directions on two and on one rank; once each
    assert done.stdout.count("wrote ") == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("SMOKE RUN, no kernel figures: lengths: forward on 2: ")
    assert (out / "table.txt").read_text().splitlines()[-1] == last
    names = [f"{d}-{s}.png" for d in (FORWARD, BACKWARD) for s in ("lengths", "scaling")]
    assert {path.name for path in out.iterdir()} == {*names, "results.json", "table.txt"}
    found = Results.load(out / "results.json")
    assert found.complete
    assert found.smoke
    assert found.machine["ranks"] == 2
    assert found.left_out == []
    for row in found.rows:
        assert isinstance(row, RingRow)
        assert row.stopped is None
        assert [match.stopped for match in row.matches.values()] == [None] * (row.world)
        assert row.engine == "executor"
        assert row.transport == ("gloo" if row.world == 2 else None)
        assert row.of_yardstick is not None
        assert row.flops * row.world == found.rows[-1].flops * (
            1.0 if row.direction == BACKWARD else 0.4
        )
    (out / names[0]).unlink()
    assert main(["ring", "--plot-only", str(out / "results.json")]) == 0
    assert (out / names[0]).exists()


def test_errors_host_times_and_memory_have_sets_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = torchrun(2, "--device", "cpu", "--set", "error", "host", "memory", "--out", out)
    assert done.returncode == 0, done.stderr
    found = Results.load(out / "results.json")
    assert found.left_out == ["memory: only a GPU counts it"]
    assert found.settings["numa_nodes"] == [None, None]
    rows = [row for row in found.rows if isinstance(row, RingRow)]
    assert [(row.set, row.direction) for row in rows] == [
        (ERROR, FORWARD), (ERROR, FORWARD), (HOST, FORWARD),
        (ERROR, BACKWARD), (ERROR, BACKWARD), (HOST, BACKWARD),
    ]  # fmt: skip
    for row in rows:
        assert row.stopped is None
        assert row.head is None
        if row.set == ERROR:
            assert row.alone.keys() == row.errors.keys() == row.error_growth.keys()
        else:
            assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row.host.values())
    assert {path.name for path in out.iterdir()} == {"results.json", "table.txt"}
    error, host = done.stdout.splitlines()[-2:]
    assert "error: on 2 ranks over one, against float64: RingFA3 out " in error
    assert " dv " in error
    assert "host: µs to start a call, by rank: forward RingFA3 without gradients " in host
    assert "; backward RingFA3 " in host


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no CUDA GPU is visible; --device cpu tries the machinery"),
        (("--device", "cpu", "--worlds", "2"), "--worlds 2: there are 1 ranks; start it under tor"),
        (("--device", "cpu", "--worlds", "0"), "--worlds 0: from 1 to 1 are possible"),
        (("--device", "cpu", "--pairs", "9"), "--pairs 9: an interval needs 10 or more"),
        (("--device", "cpu", "--fa3", "x.so"), "--fa3 needs a GPU"),
        (("--device", "cpu", "--shortest", "999999"), "nothing to measure: "),
        (("--device", "cpu", "--out", __file__), "--out"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["ring", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ringfa3.bench: ")
    assert said in line


def test_without_torchrun_it_is_one_rank_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = ("--longest", "16384")
    assert main(["ring", "--device", "cpu", *longest, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "left out: several ranks: this is one process without torchrun" in said.err
    found = Results.load(tmp_path / "results.json")
    assert [(row.direction, row.label) for row in found.rows] == [
        (FORWARD, "16"), (BACKWARD, "16"),
    ]  # fmt: skip


def test_a_lost_rank_ends_the_run_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hold(case: RingCase, direction: str, *_: object) -> Row:
        row = RingRow.of(case, direction, "bfloat16", LINEUP)
        if case.tokens > 16:
            lost = DeviceLostError("no word from rank 1 within 420 s")
            row.stopped, lost.row = "failed: no word", row
            raise lost
        return row

    monkeypatch.setattr(ring, "hold", hold)
    arguments = ["ring", "--device", "cpu", "--direction", "fwd", "-q", "--out", str(tmp_path)]
    assert main(arguments) == 1
    assert "stopped: no word from rank 1 within 420 s" in capsys.readouterr().err
    found = Results.load(tmp_path / "results.json")
    assert not found.complete
    assert [row.stopped for row in found.rows] == [None, "failed: no word"]


def test_the_sets_have_the_sizes_of_their_names() -> None:
    whole = list(RING_SETS["lengths"](4, 1))
    assert [c.tokens // 1024 for c in whole] == [16, 32, 64, 128, 256]
    (documents,) = RING_SETS["documents"](4, 1)
    assert documents.tokens == 256 * 1024
    assert all(1024 <= n < 65536 for n in documents.lengths[:-1])
    (window,) = RING_SETS["window"](4, 1)
    assert (window.tokens, window.window) == (256 * 1024, (4096, 0))
    shards = [list(RING_SETS["memory"](world, 1)) for world in (2, 4)]
    for found, world in zip(shards, (2, 4), strict=True):
        assert [c.tokens // world // 1024 for c in found] == [4, 16, 64]
    assert [c.label for c in shards[0]] == [c.label for c in shards[1]]
    exact = list(RING_SETS["error"](4, 1))
    assert [c.tokens for c in exact] == [8192, 8192]
    (quick,) = RING_SETS["host"](4, 1)
    assert quick.tokens == 4096
    for case in (*whole, documents, window, *shards[0], *exact, quick):
        assert (case.heads, case.kv_heads, case.head_dim) == (32, 8, 128)
    assert whole[0].flops(FORWARD) == 4 * 32 * 128 * (16384 * 16385 // 2) // 4


@pytest.mark.parametrize(("lengths", "left"), [((48,), -1), ((40, 1, 17, 30), -1), ((64,), 5)])
def test_a_spread_is_that_of_a_count(lengths: tuple[int, ...], left: int) -> None:
    """Against the whole mask and the ranks' tokens, for tiles of 4 rows."""
    world, tile_m = 3, 4
    case = ring_case("any", "any", lengths, world, left)
    allowed = mask(lengths, lengths, left, 0)
    plans = [
        plan_context(case.cumulative, (r, world), window_size=(left, -1)) for r in range(world)
    ]
    tokens = [plan.token_index.numpy() for plan in plans]
    found = Spread.of(case, tile_m)
    work = np.array([allowed[mine].sum() for mine in tokens])
    assert found.imbalance == pytest.approx(work.max() / work.mean())

    real = visited = 0
    for plan, mine in zip(plans, tokens, strict=True):
        segments = plan.shards[plan.rank]
        for begin, length in zip(segments.row, segments.length, strict=True):
            for first in range(begin, begin + length, tile_m):
                rows = mine[first : min(first + tile_m, begin + length)]
                keys = int(allowed[rows].any(0).sum())
                real, visited = real + keys * len(rows), visited + keys
    assert found.fullness == pytest.approx(real / visited / tile_m)

    moved = sum(  # forwarded from rank to rank, as far as somebody still sees it
        max((t for t in range(1, world) if allowed[tokens[(o + t) % world], key].any()), default=0)
        for o in range(world)
        for key in tokens[o]
    )
    assert moved <= found.kv_rows <= moved * 1.5
    assert found.kv_share == found.kv_rows / (case.tokens * (world - 1))


def test_a_window_moves_in_proportion_to_itself() -> None:
    rows = [Spread.of(ring_case("w", "w", (16384,), 4, left), 128).kv_rows for left in (256, 512)]
    assert rows[1] == pytest.approx(2 * rows[0], rel=0.01)


class Gpu:
    """A device's memory: what the allocator holds, and what an arena does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached = self.arena = 0
        monkeypatch.setattr(memory, "used", lambda device: 1000 + self.cached + self.arena)
        monkeypatch.setattr(memory, "release", lambda device: self.call(0))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def call(self, cached: int, arena: int = 0) -> None:
        self.cached, self.arena = cached, max(self.arena, arena)


def test_memory_is_the_peak_with_what_was_kept_from_earlier_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, scales = Gpu(monkeypatch), Scales(torch.device("cpu"))

    def weigh(name: str, cached: int, arena: int = 0) -> Held:
        return scales.weigh(name, lambda: gpu.call(cached, arena))

    assert weigh("ours", 5, 3) == Held(8, 3)
    scales.tare("ours")
    assert weigh("ours", 50, 30) == Held(77, 27)
    assert weigh("peer", 60) == Held(60, 0)
    assert weigh("ours", 50, 30) == Held(77, 27)  # the arena is there already, and still ours
    assert weigh("ours", 100, 60) == Held(157, 57)


def test_what_only_a_first_call_takes_is_not_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, scales = Gpu(monkeypatch), Scales(torch.device("cpu"))
    peaks = iter((90, 50))
    assert scales.weigh("ours", lambda: gpu.call(next(peaks), 30)) == Held(80, 30)


def match(ratio: float | None, stopped: str | None = None) -> Match:
    if ratio is None:
        return Match(stopped=stopped)
    return Match(
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
                    if case.set == MEMORY and direction == FORWARD:
                        continue
                    row = RingRow.of(case, direction, "bfloat16", LINEUP)
                    row.yardsticks = LINEUP[1:3]
                    row.engine, row.transport = "kernels", "symmetric" if world > 1 else None
                    row.gathered = 5 << 20 if case.set in (LENGTHS, MEMORY) and world > 1 else None
                    row.errors, row.alone = {"out": 2.1e-3}, {"out": 2e-3}
                    if case.set == HOST:
                        row.host = {"RingFA3": [2.5e-4, 3e-4, 2e-4, 2e-4]}
                    if case.set == MEMORY:
                        row.memory = {"RingFA3": 3 << 30, "Ulysses on FA3": "out of memory"}
                        row.memory |= {"ring-flash-attn on FA3": 4 << 30}
                        row.kept = {"RingFA3": 1 << 30}
                    if case.set in (HOST, MEMORY, ERROR):
                        rows.append(row)
                        continue
                    row.matches = {
                        "RingFA3 alone": match(0.97),
                        "FA3 alone": match(0.95),
                        "Ulysses on FA3": match(1.02)
                        if world > 1 and case.set == LENGTHS
                        else match(None, "failed: no [answer] (rank 1)"),
                    }
                    rows.append(row)
    rows[1].matches, rows[1].stopped = {}, "wrong: out is off by 1"
    machine = {"device": "NVIDIA H200", "date": "2026-11-20"}
    return Results({}, machine, False, [], rows, True, "ring")


def test_json_and_back_is_the_same(results: Results, tmp_path: Path) -> None:
    found = Results.load(results.save(tmp_path))
    assert found == results
    assert all(isinstance(row, RingRow) for row in found.rows)


def test_the_yardstick_is_the_faster_one() -> None:
    row = RingRow.of(ring_case("lengths", "16", (16,), 2), FORWARD, "bfloat16", LINEUP)
    row.yardsticks = LINEUP[1:3]
    assert row.of_yardstick is None
    row.matches = {"FA3 alone": match(None, "failed"), "RingFA3 alone": match(0.97)}
    assert row.of_yardstick is not None
    assert row.of_yardstick[0] == "RingFA3 alone"
    row.matches |= {"FA3 alone": match(0.95), "Ulysses on FA3": match(0.5)}
    assert row.of_yardstick[0] == "FA3 alone"


def test_tables_say_what_ran_and_every_row_with_figures_or_why_not(results: Results) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        for table in ring_tables(results):
            console.print(table)
    said = captured.get()
    assert "forward, bfloat16, TFLOP/s of one GPU" in said
    ran = "RingFA3 ran on kernels and symmetric (hop by hop), kernels and symmetric (one launch)"
    assert ran in " ".join(said.split())
    assert any(x.split("│")[-2].strip() == "5" for x in said.splitlines() if "3072 (1024)" in x)
    line = next(x for x in said.splitlines() if " 4 │ 64 " in x)
    for cell in ("600", "0.950 [0.940, 0.960]", "588 (1.020)", "1.05", "250"):
        assert cell in line
    assert "wrong: out is off by 1" in said
    assert "no [answer]" in said
    assert "3072 (1024)" in said
    assert "out of memory" in said
    assert "How the plan spreads a case" in said


def test_each_set_has_a_line_at_the_end(results: Results) -> None:
    lengths, documents, _, error, host, memory, rest = ring_lines(results)
    assert lengths.startswith("lengths: forward on 4: 0.950 0.950 0.950 0.950 of the yardstick, ")
    assert "1.020 1.020 1.020 1.020 of Ulysses on FA3" in lengths  # not of the row that stopped
    assert "; backward on 1: 0.950" in lengths
    assert documents.startswith("documents: forward on 4: 0.970 of RingFA3 alone, 0.950 of FA3 al")
    assert "tiles 1.000 full" in documents
    assert memory.startswith("memory: 16 a GPU, MiB on 4 ranks, RingFA3 3072 (0.750 of ring-flash-")
    assert "), Ulysses on FA3 -, ring-flash-attn on FA3 4096; 64 a GPU, MiB on 4 ranks, " in memory
    assert error == "error: on 4 ranks over one, against float64: RingFA3 out 1.050"
    by_rank = "RingFA3 250 300 200 200"
    assert host == f"host: µs to start a call, by rank: forward {by_rank}; backward {by_rank}"
    assert rest == "1 rows without figures, the first: wrong: out is off by 1"
    results.smoke = True
    assert ring_lines(results)[0].startswith("SMOKE RUN, no kernel figures: lengths: ")


def test_plots_show_peers_and_both_scalings(results: Results, tmp_path: Path) -> None:
    from ringfa3.bench.plot import _scaling, _worlds

    drawn = {path.name for path in draw(results, tmp_path)}
    sets = ("lengths", "scaling", "masks")
    assert drawn == {f"{d}-{s}.png" for d in (FORWARD, BACKWARD) for s in sets}
    rows = [r for r in results.rows if isinstance(r, RingRow) and r.direction == BACKWARD]
    whole = [r for r in rows if r.set == LENGTHS]
    ((four,), (one,)) = _worlds(whole)
    assert four.groups == one.groups == ["64", "128", "256", "512", "1k"]
    assert [s.name for s in four.series] == LINEUP
    strong, weak = _scaling(whole)
    assert strong.groups == weak.groups == ["1", "4"]
    assert [s.label for s in weak.series] == ["64 a GPU", "128 a GPU", "256 a GPU"]
    for series in weak.series:
        assert len({sum(r.lengths) // r.world for r in series.rows if isinstance(r, RingRow)}) == 1
    for series in strong.series:
        assert len({sum(r.lengths) for r in series.rows if r}) == 1


def test_without_a_kernel_nothing_of_a_direction_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons = {FORWARD: None, BACKWARD: "there are none"}
    monkeypatch.setattr(ring, "executor_reason", lambda direction, q: reasons[direction])
    options = ring.Options(
        ["lengths", "memory"],
        "bf16",
        None,
        0,
        1 << 20,
        "both",
        ["auto"],
        10,
        60.0,
        None,
        "cuda",
        None,
        False,
    )
    todo, left_out = ring._todo(options, [2, 1], torch.device("meta"))
    assert [case.world for case, _ in todo] == [2] * 5 + [1] * 4  # no more than 128k a rank
    assert {direction for _, direction in todo} == {FORWARD}
    assert left_out == [
        "backward: there are none, and the executor is not timed in its place",
        "memory of a forward and backward: there is no backward in this run",
    ]


def test_the_default_worlds_are_powers_of_two_and_all_ranks() -> None:
    assert ring._worlds(None, 8) == [8, 4, 2, 1]
    assert ring._worlds(None, 6) == [6, 4, 2, 1]
    assert ring._worlds([2, 1, 2], 4) == [2, 1]
    assert replace(ring_case("lengths", "", (16,), 4), world=2).flops(FORWARD) == 4 * 136 * 128 * 16
