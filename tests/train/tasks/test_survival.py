"""If this fails, a killed run loses steps, or continues differently. Killed, stopped and damaged
runs continue, and compute the same as an undisturbed run.

torchrun and its workers are forks, but with two agents, new interpreters.

The reference is an undisturbed run: the loss and the gradient norm of each step must be bit-equal.
``pytest -m soak`` repeats the random tests with other seeds.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.forks import Fork
from tests.train.jobs import (
    HANG_S,
    Job,
    event_times,
    events,
    is_alive,
    run_ranks,
    start_ranks,
    steps,
)
from tests.train.two_hosts import two_hosts
from train.data.manifest import verify

STEPS = 50
SPREAD = {"cp 1": (2, 1), "cp 2": (2, 2), "dp 2 x cp 2": (4, 2)}  # processes, cp


@pytest.fixture(scope="module")
def overrides(overrides) -> list[str]:
    changed = [f"train.steps={STEPS}", "checkpoint.every=7", "train.eval_every=0"]
    threads = "parallel.threads=1"  # one agent's processes share the cores, two agents' do not
    return [*overrides, *changed, threads, "train.final_eval_bytes=1"]


class Undisturbed:
    """Undisturbed runs by number of processes and cp; each runs at most once."""

    def __init__(self, overrides: list[str], make_folder: Callable[[str], Path]) -> None:
        self.overrides, self.make_folder = overrides, make_folder
        self.folders: dict[tuple[int, int], Path] = {}

    def folder(self, processes: int, cp: int) -> Path:
        if (processes, cp) not in self.folders:
            folder = self.folders[processes, cp] = self.make_folder("undisturbed") / "run"
            run_ranks(processes, *self.overrides, f"parallel.cp={cp}", f"run.dir={folder}")
            assert [step for step, _, _ in steps(folder)] == list(range(1, STEPS + 1))
        return self.folders[processes, cp]

    def __call__(self, processes: int, cp: int) -> list[tuple[int, float, float]]:
        """The steps of the run."""
        return steps(self.folder(processes, cp))


@pytest.fixture(scope="module")
def undisturbed(overrides, tmp_path_factory) -> Undisturbed:
    return Undisturbed(overrides, tmp_path_factory.mktemp)


# The suite runs one trial at cp 2; `-m soak` runs ten of each.
TRIALS = [
    pytest.param(spread, trial, marks=pytest.mark.soak if trial or spread != "cp 2" else ())
    for spread in SPREAD
    for trial in range(10)
]


@pytest.mark.parametrize(("spread", "trial"), TRIALS)
def test_a_run_with_a_killed_rank_is_bit_equal(overrides, undisturbed, tmp_path, spread, trial):
    """SIGKILL of a random rank after a random step, under ``--max-restarts 1``."""
    processes, cp = SPREAD[spread]
    dice = random.Random(f"{spread} {trial}")
    victim, when = dice.randrange(processes), dice.randrange(1, STEPS - 5)
    launcher = ("--standalone", "--max-restarts", "1")
    folder = tmp_path / "run"
    with Job(folder, processes, *overrides, f"parallel.cp={cp}", launcher=launcher) as job:
        job.await_step(when)
        first = job.pids()
        os.kill(first[victim], signal.SIGKILL)
        job.finish()
        assert not set(first) & set(job.pids())
    assert steps(folder) == undisturbed(processes, cp)
    assert any(
        event.startswith(("continues after step", "starts at")) for event in events(folder)[1:]
    )


def test_a_refusal_stands_when_torchrun_restarts_the_job(overrides, tmp_path):
    """Another learning rate, under ``--max-restarts 1``: refused twice, and nothing is changed."""
    folder, launcher = tmp_path / "run", ("--standalone", "--max-restarts", "1")
    with Job(folder, 1, *overrides, "train.steps=2") as job:
        job.finish()
    before = (folder / "config.json").read_text()
    with Job(folder, 1, *overrides, "train.steps=4", "optim.lr=0.5", launcher=launcher) as job:
        code, output = job.end()
    assert code == 1
    assert output.count("contains a run with different settings: optim.lr was ") == 2, output
    assert "continues after step" not in output
    assert (folder / "config.json").read_text() == before


def stop(folder: Path, overrides: list[str], whom: str, after: int) -> int:
    """SIGTERM to ``whom`` after step ``after``: the last finished step is saved, and returned."""
    with Job(folder, 2, *overrides, "parallel.cp=2") as job:
        starts = len(events(folder)) if (folder / "events.jsonl").exists() else 0
        job.until(lambda: (folder / "events.jsonl").exists() and len(events(folder)) > starts)
        job.await_step(after)
        pids = job.pids()
        target = {"rank 0": pids[0], "rank 1": pids[1], "torchrun": job.process.pid}[whom]
        os.kill(target, signal.SIGTERM)
        code, output = job.end(limit=25)
        assert code == (1 if whom == "torchrun" else 0), output  # torchrun itself exits 1
        assert not any(is_alive(pid) for pid in pids)
    done = len(steps(folder))
    assert after <= done < STEPS
    assert verify(folder / "checkpoints" / f"step-{done:08d}").metadata["step"] == done
    assert events(folder)[-1].startswith(f"SIGTERM: stopped after step {done}, which is saved")
    return done


@pytest.fixture(scope="module")
def stopped(overrides, tmp_path_factory) -> tuple[Path, int]:
    """The folder of a run at cp 2 that SIGTERM to rank 1 has stopped, and its last step."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    return folder, stop(folder, overrides, "rank 1", 10)


@pytest.mark.parametrize(
    ("processes", "spread"),
    [(4, ["parallel.cp=4"]), (2, ["parallel.cp=1", "train.gradient_accumulation_steps=1"])],
    ids=["cp 4", "dp 2"],
)
def test_a_run_continues_at_another_cp_and_dp(
    overrides, undisturbed, stopped, tmp_path, processes, spread
):
    """Stopped at cp 2, continued elsewhere: 20 further steps within 1e-4.

    The run that continues at dp 2 used two micro-batches before, so its steps are the same.
    """
    folder = tmp_path / "run"
    if processes == 2:
        last = stop(folder, [*overrides, "train.gradient_accumulation_steps=2"], "torchrun", 10)
    else:
        last = stopped[1]
        shutil.copytree(stopped[0], folder)
    assert 10 <= last < STEPS - 20
    run_ranks(processes, *overrides, *spread, f"run.dir={folder}")
    expected = undisturbed(2, 1) if processes == 2 else undisturbed(2, 2)
    compared = last + 20
    assert len(steps(folder)) == len(expected) == STEPS
    for own, other in zip(steps(folder)[:compared], expected[:compared], strict=True):
        assert own == pytest.approx(other, rel=1e-4)


def test_sigterm_saves_the_last_finished_step(overrides, undisturbed, stopped, tmp_path):
    """To rank 1, rank 0 and torchrun in turn. A damaged last checkpoint is quarantined, and
    the run continues from the one before."""
    folder, done = tmp_path / "run", stopped[1]
    shutil.copytree(stopped[0], folder)
    for whom in ("rank 0", "torchrun"):
        before, done = done, stop(folder, overrides, whom, done + 3)
        assert events(folder)[-2] == f"continues after step {before}, from step-{before:08d}"
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    run_ranks(2, *overrides, "parallel.cp=2", f"run.dir={folder}")
    assert events(folder)[-1] == f"continues after step {done}, from step-{done:08d}"
    assert steps(folder) == undisturbed(2, 2)
    *_, older, newest = sorted((damaged / "checkpoints").glob("step-*"))
    os.truncate(newest / "__1_0.distcp", 1000)
    output = run_ranks(2, *overrides, "parallel.cp=2", f"run.dir={damaged}")
    assert re.search(rf"renamed to damaged-{newest.name}.*__1_0.distcp has 1000 bytes", output)
    expected = f"continues after step {int(older.name.removeprefix('step-'))}, from {older.name}"
    assert events(damaged)[-1] == expected
    assert steps(damaged) == undisturbed(2, 2)


def await_lines(path: Path, count: int, ranks: list[Fork]) -> None:
    deadline = time.monotonic() + HANG_S
    while not (path.exists() and path.read_text().count("\n") >= count):
        assert all(rank.poll() is None for rank in ranks)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_in_the_middle_of_a_slow_step(overrides, undisturbed, tmp_path):
    """A step takes minutes: all ranks exit 0 within 25 s, and the step before it is saved."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed.folder(2, 2), folder)
    before = len(events(folder))
    accepted = "checkpoint.accept_changes=[train.global_batch_size,train.steps]"
    slow = [
        "parallel.cp=2",
        "train.steps=99",
        "train.gradient_accumulation_steps=4000",
        "checkpoint.every=0",
    ]
    ranks = start_ranks(*[[*overrides, *slow, accepted, f"run.dir={folder}"]] * 2)
    try:
        await_lines(folder / "events.jsonl", before + 1, ranks)  # resumed
        time.sleep(3)
        begin = time.monotonic()
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        output = [rank.communicate(timeout=25)[1] for rank in ranks]
        assert time.monotonic() - begin < 25
        assert [rank.returncode for rank in ranks] == [0, 0], output
    finally:
        for rank in ranks:
            rank.kill()
    assert len(steps(folder)) == STEPS
    assert events(folder)[-1].startswith(f"SIGTERM: stopped after step {STEPS}, which is saved")


def test_ctrl_c_saves_and_exits_130(overrides, tmp_path):
    folder = tmp_path / "run"
    (rank,) = start_ranks([*overrides, "train.steps=100000", f"run.dir={folder}"])
    try:
        await_lines(folder / "metrics.jsonl", 3, [rank])
        rank.send_signal(signal.SIGINT)
        rank.communicate(timeout=25)
        assert rank.returncode == 130
    finally:
        rank.kill()
    assert events(folder)[-1].startswith("Ctrl-C: stopped after step ")


def test_with_a_peer_gone_nothing_is_saved(overrides, tmp_path):
    """SIGSTOP to rank 1, then SIGTERM to rank 0: it exits 1 and changes no checkpoint."""
    folder = tmp_path / "run"
    ranks = start_ranks(
        *[[*overrides, "parallel.cp=2", "train.steps=100000", f"run.dir={folder}"]] * 2
    )
    try:
        await_lines(folder / "metrics.jsonl", 10, ranks)
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        before = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        ranks[0].send_signal(signal.SIGTERM)
        _, output = ranks[0].communicate(timeout=25)
        assert ranks[0].returncode == 1
        words = (
            r"rank 0, step \d+: SIGTERM, but nothing was saved: no answer from rank 1 within 8 s"
        )
        assert re.search(words, output)
        assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == before
    finally:
        for rank in ranks:
            rank.kill()


def test_the_wall_time_is_kept(overrides, tmp_path):
    """Measured from the start of the run: the start-up time depends on the machine."""
    folder = tmp_path / "run"
    long = ["train.steps=100000", "train.max_wall_time=5", "checkpoint.every=0"]
    run_ranks(2, *overrides, "parallel.cp=2", *long, f"run.dir={folder}")
    end = time.time()
    assert re.match(r"train.max_wall_time has passed: stopped after step \d+", events(folder)[-1])
    starts, *_, stops = event_times(folder)
    assert stops - starts < 15
    assert end - stops < 15


def test_two_agents_survive_the_kill_of_a_worker(overrides, undisturbed, tmp_path):
    """Two agents as on two hosts: only one of them counts the failed attempt."""
    folder = tmp_path / "run"
    with two_hosts(folder, *overrides, "parallel.cp=2") as job:
        job.agents[0].await_step(20)
        first = job.agents[0].pids()
        os.kill(first[1], signal.SIGKILL)
        job.finish()
        assert not set(first) & set(job.agents[0].pids())
    assert steps(folder) == undisturbed(2, 2)


@pytest.mark.soak
def test_a_new_agent_takes_the_place_of_a_killed_one(overrides, undisturbed, tmp_path):
    """torchrun notices a dead agent after 15 s."""
    folder = tmp_path / "run"
    with two_hosts(folder, *overrides, "parallel.cp=2", replaceable=True) as job:
        job.agents[0].until((folder / "checkpoints" / "step-00000014").exists)
        job.replace(1)
        job.finish()
    (event,) = events(folder)[1:]
    assert event.startswith("continues after step ")
    assert steps(folder) == undisturbed(2, 2)


def test_the_last_lines_name_the_dead_rank_once(overrides, tmp_path):
    """torchrun's report names rank 1, its step and the cause; nothing else prints them."""
    folder = tmp_path / "run"
    arguments = [*overrides, "parallel.cp=2", "train.steps=100000"]
    with Job(folder, 2, *arguments) as job:
        job.await_step(10)
        os.kill(job.pids()[1], signal.SIGKILL)
        code, output = job.end()
    expected = r"rank 1, step \d+: killed by a signal, for example by the system's OOM killer"
    assert code == 1
    cause = output[output.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", cause)
    assert re.search(expected, cause)
    assert len(re.findall(expected, output)) == 1


TEARDOWNS = [
    pytest.param(1),
    pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize("times", TEARDOWNS)
def test_runs_of_four_processes_end_cleanly(overrides, tmp_path, times):
    """``Job.finish`` has the conditions, here as after every other run that ends by itself."""
    for number in range(times):
        folder = tmp_path / f"run{number}"
        with Job(folder, 4, *overrides, "parallel.cp=2", "train.steps=2") as job:
            job.finish()
        assert json.loads((folder / "summary.json").read_text())["steps"] == 2
