"""If this fails, `python -m ringfa3.bench ring` stops, hangs, or writes no results. The command
`python -m ringfa3.bench ring`: jobs under torchrun, and their files."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringfa3.bench.__main__ import main
from ringfa3.bench.common.cases import BACKWARD, FORWARD
from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.comparison import DeviceLostError
from ringfa3.bench.common.implementations import RingFA3
from ringfa3.bench.common.results import Results, RingRow, Row
from ringfa3.bench.ring import cases, checkpoint, memory
from ringfa3.bench.ring import run as ring
from ringfa3.bench.ring import run_plan as run_plan
from ringfa3.bench.ring.cases import (
    CHECKPOINT,
    ERROR,
    FRESH,
    HOST,
    LENGTHS,
    MAGI,
    MEMORY,
    STEPS,
    RingCase,
    ring_case,
)
from ringfa3.bench.ring.load_balance import LoadBalance
from ringfa3.bench.ring.memory import MemoryMeter, MemoryUse
from ringfa3.planning.context_plan import plan_context
from tests.support.bench_job import bench_job
from tests.support.dense import mask
from tests.support.ranks import free_port, sacrifice

IMPLEMENTATIONS = ["RingFA3", "RingFA3 alone", "FA3 alone", "Ulysses on FA3"]


def bench(group: dist.ProcessGroup, port: int, *arguments: str) -> tuple[int, str]:
    """The exit code of this rank of a job, and what it prints to stdout."""
    cases.SHARD_TOKENS = cases.SHARD_TOKENS[:1]  # each further shard takes as long
    cases.SEEDS = 1
    return bench_job(group, port, "ring", *arguments)


def test_a_job_of_two_ranks_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "ringfa3.bench", "ring", "--device", "cpu", "--out", str(out)]
    command += ["--longest", "32768", "--shortest", "32768"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env
    )
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
        assert [match.stopped for match in row.comparisons.values()] == [None] * (row.world)
        assert row.engine == "executor"
        assert row.transport == ("gloo" if row.world == 2 else None)
        assert row.fastest_baseline is not None
        assert row.flops * row.world == found.rows[-1].flops * (
            1.0 if row.direction == BACKWARD else 0.4
        )
    (out / names[0]).unlink()
    assert main(["ring", "--plot-only", str(out / "results.json")]) == 0
    assert (out / names[0]).exists()


def test_sets_without_peers_from_end_to_end(tmp_path: Path) -> None:
    """Errors, host times, whole steps, and memory, which only a GPU has."""
    out = tmp_path / "out"
    sets = ("error", "host", "memory", "checkpoint", "fresh", "magi")
    arguments = ("--device", "cpu", "--set", *sets, "--out", str(out))
    (code, printed), (other, _) = sacrifice(2, 60, bench, free_port(), *arguments, limit=300)
    assert (code, other) == (0, 0)
    found = Results.load(out / "results.json")
    assert found.left_out == ["memory: only a GPU counts it"]
    assert found.settings["numa_nodes"] == [None, None]
    assert all(isinstance(row, RingRow) and row.stopped is None for row in found.rows)
    rows = [row for row in found.rows if isinstance(row, RingRow)]
    blocks = [row for row in rows if row.set == CHECKPOINT]
    fresh = [row for row in rows if row.set == FRESH]
    packed = [row for row in rows if row.set == MAGI]
    rows = [row for row in rows if row.set not in (*STEPS, MAGI)]
    assert [(row.set, row.direction) for row in rows] == [
        (ERROR, FORWARD), (ERROR, FORWARD), (HOST, FORWARD),
        (ERROR, BACKWARD), (ERROR, BACKWARD), (HOST, BACKWARD),
    ]  # fmt: skip
    for row in rows:
        assert row.first_timed is None
        if row.set == ERROR:
            outputs = row.single_gpu_errors.keys()
            assert outputs == row.errors.keys() == row.error_growth.keys()
        else:
            assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row.host.values())
    assert [(row.direction, row.world, row.label, row.transport) for row in blocks] == [
        (BACKWARD, 2, "4 a GPU", "gloo"),
        (BACKWARD, 1, "4 a GPU", None),
    ]
    for row in blocks:
        assert row.implementations == ["kept", "recomputed", "stored"]
        assert row.rings == {"kept": [1, 1], "recomputed": [2, 1], "stored": [1, 1]}
        assert row.comparisons.keys() == {"recomputed", "stored"}
        assert all(len(c.seconds[0]) == len(c.seconds[1]) == 10 for c in row.comparisons.values())
        assert row.memory == {}  # which only a GPU has
    assert [(row.direction, row.world, row.label) for row in fresh] == [
        (BACKWARD, 2, "4 a GPU"),
        (BACKWARD, 2, "magi, 8 a GPU"),
        (BACKWARD, 1, "4 a GPU"),
        (BACKWARD, 1, "magi, 8 a GPU"),
    ]
    assert [(row.direction, row.world) for row in packed] == [(FORWARD, 2), (BACKWARD, 2)]
    for row in packed:
        ((name, found_pairs),) = row.comparisons.items()
        assert name.endswith("alone, same mask")
        assert len(found_pairs.seconds[0]) == 10
    for row in fresh:
        assert row.comparisons.keys() == {"a fresh plan", "a prepared plan"}
        assert all(len(c.seconds[0]) == len(c.seconds[1]) == 10 for c in row.comparisons.values())
        assert len(row.host) == 8
        assert all(len(seconds) == row.world for seconds in row.host.values())
    assert {path.name for path in out.iterdir()} == {"results.json", "table.txt"}
    error, host, mix, block, steps = printed.splitlines()[-5:]
    assert "error: on 2 ranks over one, against float64: RingFA3 out " in error
    assert " dv " in error
    assert "host: µs to start a call, by rank: forward RingFA3 without gradients " in host
    assert "; backward RingFA3 " in host
    assert "checkpoint: kept / recomputed / stored: 4 a GPU on 2: kept " in block
    assert block.endswith(" of stored, 1 / 2 / 1 rings forward")
    assert "fresh: the same plan again / a fresh plan / a prepared plan: 4 a GPU on 2: " in steps
    assert "magi: forward on 2, magi, 8 a GPU: " in mix


@pytest.mark.parametrize(
    ("arguments", "message"),
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
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["ring", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ringfa3.bench: ")
    assert message in line


def test_without_torchrun_it_is_one_rank_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = ("--longest", "16384")
    assert main(["ring", "--device", "cpu", *longest, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "left out: several ranks: this is one process without torchrun" in printed.err
    found = Results.load(tmp_path / "results.json")
    assert [(row.direction, row.label) for row in found.rows] == [
        (FORWARD, "16"), (BACKWARD, "16"),
    ]  # fmt: skip


def test_a_lost_rank_ends_the_run_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_row(case: RingCase, direction: str, *_: object) -> Row:
        row = RingRow.of(case, direction, "bfloat16", IMPLEMENTATIONS)
        if case.tokens > 16:
            lost = DeviceLostError("no answer from rank 1 within 420 s")
            row.stopped, lost.row = "failed: no answer", row
            raise lost
        return row

    monkeypatch.setattr(ring, "measure_row", measure_row)
    arguments = ["ring", "--device", "cpu", "--direction", "fwd", "-q", "--out", str(tmp_path)]
    assert main(arguments) == 1
    assert "stopped: no answer from rank 1 within 420 s" in capsys.readouterr().err
    found = Results.load(tmp_path / "results.json")
    assert not found.complete
    assert [row.stopped for row in found.rows] == [None, "failed: no answer"]


@pytest.mark.parametrize(("lengths", "left"), [((48,), -1), ((40, 1, 17, 30), -1), ((64,), 5)])
def test_load_balance_equals_a_count(lengths: tuple[int, ...], left: int) -> None:
    """Against the whole mask and the ranks' tokens, for tiles of 4 rows."""
    world, tile_m = 3, 4
    case = ring_case("any", "any", lengths, world, left)
    allowed = mask(lengths, lengths, left, 0)
    plans = [
        plan_context(case.cumulative, (r, world), window_size=(left, -1)) for r in range(world)
    ]
    tokens = [plan.token_index.numpy() for plan in plans]
    found = LoadBalance.of(case, tile_m)
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
    assert found.tile_occupancy == pytest.approx(real / visited / tile_m)

    pairs = [(a, b) for a in tokens for b in tokens if a is not b]
    assert found.kv_rows == sum(int(allowed[np.ix_(a, b)].any(0).sum()) for a, b in pairs)
    assert found.kv_share == found.kv_rows / (case.tokens * (world - 1))


def test_a_window_moves_in_proportion_to_itself() -> None:
    rows = [
        LoadBalance.of(ring_case("w", "w", (16384,), 4, left), 128).kv_rows for left in (256, 512)
    ]
    assert rows[1] == pytest.approx(2 * rows[0], rel=0.01)


class Gpu:
    """A device's memory: of the caching allocator, and of IPC."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached = self.ipc = 0
        monkeypatch.setattr(memory, "used", lambda device: 1000 + self.cached + self.ipc)
        monkeypatch.setattr(memory, "release_memory", lambda device: self.call(0))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def call(self, cached: int, ipc: int = 0) -> None:
        self.cached, self.ipc = cached, max(self.ipc, ipc)


def test_memory_is_the_peak_with_what_earlier_calls_retain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, meter = Gpu(monkeypatch), MemoryMeter(torch.device("cpu"))

    def measure(name: str, cached: int, ipc: int = 0) -> MemoryUse:
        return meter.measure(name, lambda: gpu.call(cached, ipc))

    assert measure("ours", 5, 3) == MemoryUse(8, 3)
    meter.reset("ours")
    assert measure("ours", 50, 30) == MemoryUse(77, 27)
    assert measure("peer", 60) == MemoryUse(60, 0)
    assert measure("ours", 50, 30) == MemoryUse(77, 27)  # IPC memory of the first call counts
    assert measure("ours", 100, 60) == MemoryUse(157, 57)


def test_what_only_a_first_call_takes_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, meter = Gpu(monkeypatch), MemoryMeter(torch.device("cpu"))
    peaks = iter((90, 50))
    assert meter.measure("ours", lambda: gpu.call(next(peaks), 30)) == MemoryUse(80, 30)


def test_a_block_is_measured_at_its_peak_and_between_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, most = 100, 900  # bytes; the latter of something earlier

    def allocate(bytes_: int) -> None:
        nonlocal now, most
        now, most = bytes_, max(most, bytes_)

    class Block:
        dy = torch.empty(0)

        def forward(self, mode: str) -> None:
            allocate(150)
            allocate(130)

        def backward(self, y: object) -> None:
            allocate(170)
            allocate(100)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: most)

    def reset(device: torch.device) -> None:
        nonlocal most
        most = now

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    assert checkpoint._memory(Block(), "kept") == [70, 30]  # type: ignore[arg-type]


def test_both_forward_modes_are_measured_where_they_differ() -> None:
    options = run_plan.Options(
        [], "bf16", None, 0, 0, "both", ["symmetric", "nccl"], 10, 60.0, None, "cuda", None, False
    )
    job = ring.Job(options, ring.Loaded(RingFA3(), None, None, []), torch.device("cuda"), {}, [4])

    def names(group: str, direction: str, world: int = 4) -> list[str]:
        case = ring_case(group, "", (1024,), world)
        rings = job.rings(case, direction, Communicator(0, world))
        return [x.name.removeprefix("RingFA3 ") for x in rings]

    for group in (LENGTHS, ERROR, HOST):
        assert names(group, FORWARD) == ["symmetric", "symmetric hops", "nccl"]
        assert names(group, BACKWARD) == names(group, FORWARD, 1) == ["symmetric", "nccl"]
    both = ["symmetric gathered", "symmetric hops"]
    assert names(MEMORY, BACKWARD) == ["symmetric", *both, "nccl"]
    assert names("documents", FORWARD) == ["symmetric", "nccl"]


def test_without_a_kernel_nothing_of_a_direction_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons = {FORWARD: None, BACKWARD: "there are none"}
    monkeypatch.setattr(run_plan, "fallback_reason", lambda direction, q: reasons[direction])
    sets = ["lengths", "memory", "checkpoint"]
    options = run_plan.Options(
        sets, "bf16", None, 0, 1 << 20, "both", ["auto"], 10, 60.0, None, "cuda", None, False
    )
    todo, left_out = run_plan.planned_rows(options, [2, 1], torch.device("meta"))
    assert [case.world for case, _ in todo] == [2] * 5 + [1] * 4  # no more than 128k a rank
    assert {direction for _, direction in todo} == {FORWARD}
    assert left_out == [
        "backward: there are none, and the PyTorch fallback is not timed instead",
        "memory of a forward and backward: there is no backward in this run",
        "checkpoint of a forward and backward: there is no backward in this run",
    ]


def test_the_default_worlds_are_powers_of_two_and_all_ranks() -> None:
    assert run_plan.world_sizes(None, 8) == [8, 4, 2, 1]
    assert run_plan.world_sizes(None, 6) == [6, 4, 2, 1]
    assert run_plan.world_sizes([2, 1, 2], 4) == [2, 1]
    assert replace(ring_case("lengths", "", (16,), 4), world=2).flops(FORWARD) == 4 * 136 * 128 * 16
