"""If this fails, jobs of Slurm start with wrong ranks. ``srun`` without torchrun: the ranks come
from Slurm's variables."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.train.forks import Fork
from tests.train.jobs import HANG_S, ROOT, steps
from train import slurm
from train.slurm import first_host, set_ranks, tasks_per_node


def task(rank: int, **changes: str) -> dict[str, str]:
    """The variables of a task of ``srun --nodes 3 --ntasks 5``: 2, 2 and 1 on a node."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NODELIST": "gpu[08-10]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_NTASKS": "5",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        **changes,
    }


def test_a_task_gets_the_variables_of_torchrun(monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    for rank, (local, width, node) in {0: (0, 2, 0), 3: (1, 2, 1), 4: (0, 1, 2)}.items():
        found = task(rank)
        set_ranks(found)
        expected = {"RANK": rank, "WORLD_SIZE": 5, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": width}
        expected |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": 3}
        assert {key: int(found[key]) for key in expected} == expected
        assert found["MASTER_ADDR"] == "gpu08"
        assert 15_000 <= int(found["MASTER_PORT"]) < 30_000
    other = task(0, SLURM_JOB_ID="4712")
    set_ranks(other)
    assert other["MASTER_PORT"] != found["MASTER_PORT"]
    own = task(1, MASTER_ADDR="there", MASTER_PORT="5")
    set_ranks(own)
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("there", "5")


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/root"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # the batch script
        task(0, SLURM_STEP_NUM_TASKS="1"),  # a shell of salloc or srun --pty
        task(0, RANK="3", WORLD_SIZE="4"),  # a process of torchrun
    ],
    ids=["no Slurm", "batch", "shell", "torchrun"],
)
def test_other_processes_stay_as_they_are(environment):
    before = dict(environment)
    set_ranks(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[9,03]", "gpu9"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]n[07-08].site", "rack1n07.site"),
    ],
)
def test_the_first_host_without_scontrol(monkeypatch, nodes, first):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert first_host(nodes) == first


def stub(folder: Path, name: str, script: str) -> None:
    """An executable ``name`` in ``folder``."""
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(stat.S_IRWXU)


@pytest.mark.parametrize(("script", "first"), [("echo n7; echo n8", "n7"), ("exit 1", "n5")])
def test_the_first_host_by_scontrol(monkeypatch, tmp_path, script, first):
    stub(tmp_path, "scontrol", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert first_host("n[5-6]") == first


def test_counts_of_tasks():
    assert tasks_per_node("4(x2),3,1(x3)") == [4, 4, 3, 1, 1, 1]


def test_two_tasks_of_one_host_train_together(overrides, tmp_path):
    """They share each sample, and one of them writes the run."""
    folder = tmp_path / "run"
    short = ["parallel.cp=2", "train.steps=2", "train.eval_every=0", "train.final_eval_bytes=1"]
    one_host = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "OMP_NUM_THREADS": "1"}
    one_host |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    one_host["SLURM_JOB_ID"] = str(os.getpid())  # a port of its own
    given = [*overrides, *short, f"run.dir={folder}"]
    ranks = [Fork(given, {**os.environ, **task(rank, **one_host)}) for rank in range(2)]
    try:
        printed = [rank.communicate(HANG_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    assert len(steps(folder)) == 2
    assert [entry["rank"] for entry in json.loads((folder / "ranks.json").read_text())] == [0, 1]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_batch_script_starts_the_trainer_and_queues_a_saved_job_again(tmp_path, launcher):
    """With stubs of Slurm's commands: the command line of each form, and the requeue.

    A job that fails before it writes an event is not queued again: it would fail for ever.
    """
    script = (ROOT / "examples" / "train.sbatch").read_text()
    (tmp_path / "train.sbatch").write_text(script.replace("run=/shared", f"run={tmp_path}"))
    run = tmp_path / "runs" / "1b"
    run.mkdir(parents=True)
    stub(tmp_path, "srun", 'echo "srun $*"; [ -z "$EVENT" ] || echo "$EVENT" >> "$EVENTS"')
    stub(tmp_path, "scontrol", '[ "$1" = show ] && echo gpu1 || echo "scontrol $*"')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[1-2]"}
    environment["EVENTS"] = str(run / "events.jsonl")
    stopped = json.dumps({"event": "SIGUSR1: stopped after step 3, which is saved; the"})
    for event, queued in ((stopped, True), ("", False), ('{"event": "complete"}', False)):
        done = subprocess.run(
            ["bash", str(tmp_path / "train.sbatch"), *([launcher] if launcher != "srun" else [])],
            env={**environment, "EVENT": event},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        start, *rest = done.stdout.splitlines()
        program = "python " if launcher == "srun" else "torchrun --nnodes 2"
        assert start.startswith(f"srun --kill-on-bad-exit=1 {program}")
        assert "train/pretrain.py model=1b data=text data.path=/shared/text " in start
        assert rest == (["scontrol requeue 7"] if queued else [])
