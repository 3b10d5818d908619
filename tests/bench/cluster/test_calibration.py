"""If this fails, predictions for many GPUs rest on wrong costs. Calibration of the time model:
costs are found again from times that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from ringfa3.bench.__main__ import main
from ringfa3.bench.cluster import calibrate
from ringfa3.bench.cluster.calibrate import Measured, _Job, fit, least_squares
from ringfa3.bench.cluster.mixes import DISTRIBUTIONS, Mix
from ringfa3.bench.cluster.rates import Overhead, Rates
from ringfa3.bench.cluster.strategies import Batch, direct, symmetric
from ringfa3.bench.cluster.time_model import Heads, milliseconds, overlapped
from ringfa3.bench.common.machine import BenchError
from tests.support.bench_job import bench_job
from tests.support.ranks import free_port, sacrifice

HEADS = Heads(8, 2, 64)
RATES = Rates(
    5e14, 4e14, 3e11, 4e10, 1e-6,
    (Overhead(9e-6, 5e-6, 2e-9, 30e-6, 7e-6, 4e-6), Overhead(20e-6, 8e-6, 3e-9, 40e-6, 9e-6, 5e-6)),
)  # fmt: skip


def timed(rates: Rates) -> list[Measured]:
    """Batches on 1 to 8 GPUs, with the times that the rates give."""
    found = []
    for name, tokens in (("short", 2048), ("tail", 8192), ("magi", 32768)):
        for world in (1, 2, 8):
            batch = Batch(
                Mix(name, DISTRIBUTIONS[name], tokens).draw(0, world), world, world, HEADS
            )
            load = direct(batch)
            parts = milliseconds(load, HEADS, rates)
            step, host = ([x / 1e3 for x in ms] for ms in (overlapped(parts), parts["host"]))
            found.append(Measured(name, 0, load, (step[0], step[1]), (host[0], host[1])))
    return found


def test_costs_are_found_again() -> None:
    """To 1e-9. Times of some calls are those of their hosts, and say nothing of GPUs."""
    measured = timed(RATES)
    bound = [x.step[0] == x.host[0] for x in measured]
    assert any(bound)
    assert not all(bound)
    assert {x.load.launches[0].number for x in measured} >= {1, 2}
    start = replace(RATES, forward=1.0, backward=1.0, overheads=(Overhead(), Overhead()))
    found = fit(measured, HEADS, start)
    for name in ("forward", "backward", "nvlink", "nic", "message"):
        assert getattr(found, name) == pytest.approx(getattr(RATES, name), rel=1e-9)
    for one, other in zip(found.overheads, RATES.overheads, strict=True):
        assert vars(one) == pytest.approx(vars(other), rel=1e-9)


def test_calls_that_hosts_bind_give_no_rate() -> None:
    slow = replace(RATES, overheads=(Overhead(host=1.0), Overhead(host=1.0)))
    with pytest.raises(BenchError, match="no forward takes longer on the GPU"):
        fit(timed(slow), HEADS, RATES)


def test_no_cost_is_negative() -> None:
    """To 1e-12. The first column would get -1 and the last one 3; then the column before it would
    have all the cost of the last one."""
    counts = np.array([[1.0, 0, 1], [1, 0, 2], [1, 0, 3]])
    assert least_squares(counts, np.array([2.0, 5, 8]), 2)[:2] == [0, 0]
    counts = np.array([[1.0, 2], [2, 3], [3, 4]])
    costs = least_squares(counts, counts @ [1.5, -0.25], 1)
    assert costs[0] == 0
    assert costs[1] > 0
    assert least_squares(counts, counts @ [0.5, 2.0], 1) == pytest.approx([0.5, 2], rel=1e-12)


def test_links_are_measured_between_ranks_that_use_them() -> None:
    """Each rank receives from the one that sends to it. Ranks of a host are neighbours in a ring,
    and so are hosts."""
    asked: list[dict[tuple[int, int], str]] = []
    for rank in range(9):
        pairs: list[tuple[int, int]] = []
        comm = SimpleNamespace(rank=rank, world=9)
        job = SimpleNamespace(comm=comm, per_host=3, moved_by="nccl")
        job._link = lambda to, source, pairs=pairs: pairs.append((to, source)) or (7.0, 0.5)
        rates = _Job.with_links(job, RATES)  # type: ignore[arg-type]
        assert (rates.nvlink, rates.nic, rates.message) == (7.0, 7.0, 0.5)
        near, far = pairs
        asked.append({near: "near", far: "far"})
    ends = [{name: pair for pair, name in found.items()} for found in asked]
    for name in ("near", "far"):
        for rank in range(9):
            to, source = ends[rank][name]
            assert ends[to][name][1] == ends[source][name][0] == rank
            assert (to // 3 == rank // 3) == (name == "near")
    job.moved_by = "symmetric"
    assert _Job.with_links(job, RATES) is RATES  # type: ignore[arg-type]


def test_tiles_of_launches() -> None:
    """Exactly. Of 8 chunks of 128 tokens rank r has r and 7 - r. Chunk 0 attends to itself alone,
    the last one to all ranks; a tile attends in as many launches as owners of its keys."""
    batch = Batch(np.array([1024]), 4, 4, HEADS)
    ring = symmetric(batch).launches
    assert (ring[0].number, ring[1].number) == (1, 4)
    assert ring[0].tiles.tolist() == [2, 2, 2, 2]
    hops = direct(batch).launches[0]
    assert hops.number == 4
    assert hops.tiles.tolist() == [1 + 4, 2 + 4, 3 + 4, 4 + 4]
    # Keys of chunks 0 to 7 - r, which include both of rank r's own, of the others one more
    assert ring[1].tiles.tolist() == [8, 7, 6, 5]


def calibrated(group: dist.ProcessGroup, port: int, *arguments: str) -> tuple[int, str]:
    """As `bench_job`, with one sample of each time."""
    calibrate.SAMPLES = 1
    return bench_job(group, port, "cluster", "--calibrate", *arguments)


def test_a_job_of_two_ranks(tmp_path: Path) -> None:
    """Times are those of the PyTorch fallback. They are positive, and predictions read from the
    file use them."""
    small = "--heads", "2", "--head-dim", "8"
    given = "--mix", "short", "--tokens", "192", "--seeds", "1", "--device", "cpu"
    arguments = *small, *given, "--out", str(tmp_path)
    (code, printed), (other, _) = sacrifice(2, 60, calibrated, free_port(), *arguments, limit=300)
    assert (code, other) == (0, 0)
    starts = ("short: forward", "farthest off: short ", "wrote ")
    for line, start in zip(printed.splitlines(), starts, strict=True):
        assert line.startswith(start)
    content = json.loads((tmp_path / "calibration.json").read_text())
    assert content["settings"]["transport"] == "gloo"
    assert content["rates"]["nvlink"] != 330e9
    assert content["rates"]["nic"] == 45e9
    assert [(row["mix"], row["alone"], row["fitted"]) for row in content["rows"]] == [
        ("short", False, True), ("short", True, True), ("short", False, False),
    ]  # fmt: skip
    for row in content["rows"]:
        assert min(*row["measured_ms"], *row["predicted_ms"]) > 0
    path = tmp_path / "calibration.json"
    predicted = ["cluster", "--rates", str(path), "--mix", "short1", "--gpus", "2", "--seeds", "1"]
    out = tmp_path / "predicted"
    assert main([*predicted, *small, "--nic", "9", "--out", str(out), "-q"]) == 0
    rates = json.loads((out / "cluster.json").read_text())["settings"]["rates"]
    assert rates == content["rates"] | {"nic": 9e9}


def test_wrong_options_of_a_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rates.json"
    path.write_text('{"heads": {"head_dim": 64}, "rates": {"forward": 1}}')
    other = tmp_path / "other.json"
    given = {"forward": 1, "backward": 1, "nvlink": 1, "nic": 1, "message": 0}
    heads = {"head_dim": 60}
    other.write_text(json.dumps({"heads": heads, "rates": given | {"overheads": [{}, {}]}}))
    wrong = {
        "--calibrate": "--calibrate on 1 rank: start it with torchrun --nproc-per-node 2 or more",
        "--calibrate --gpus 2": "--calibrate with --gpus 2: it runs on the GPUs of the job",
        f"--rates {tmp_path}/none": "No such file or directory: give a file",
        f"--rates {path}": "KeyError 'overheads': give calibration.json of --calibrate",
        f"--rates {other}": "measured with head dim 60: give --head-dim 60",
    }
    monkeypatch.delenv("RANK", raising=False)
    for arguments, reason in wrong.items():
        assert main(["cluster", *arguments.split()]) == 2, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
