"""If this fails, a sweep stops at one failed job, or repeats finished ones. Sweeps: errors before
anything starts, and the effect of one job's end on the others."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.train.forks import SCRIPT, Fork
from tests.train.jobs import HANG_S
from train.run.run_folder import RunFolder
from train.tasks.sweep import Job, ProcessLauncher, Sweep, folder_name, quoted


@pytest.fixture
def overrides(text_folder: Path, tmp_path: Path, tmp_path_factory) -> list[str]:
    """A tiny model, three steps; the sweep goes to ``tmp_path/sweep``."""
    return [
        f"data.path={text_folder}",
        f"data.cache_dir={tmp_path_factory.getbasetemp() / 'sweep-cache'}",
        *("data.vocab_size=300", "data.held_out=0.2", "data.seq_len=200"),
        *("model.dim=32", "model.ffn_dim=64", "model.n_layers=1", "optim.warmup_steps=1"),
        *("train.steps=3", "train.eval_every=0", "train.final_eval_bytes=1", "parallel.threads=1"),
        f"sweep.dir={tmp_path / 'sweep'}",
    ]


def rows(folder: Path) -> list[dict]:
    return json.loads((folder / "sweep.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "train.seeed=0,1"], "the nearest valid one is train.seed"),
        (["-m", "train.seed=0,1", "model=tiny,tinny"], "did you mean model=tiny?"),
        (["train.seed=0,1", "-m", "train.steps=3,many"], "valid would be train.steps=300"),
        (["model.n_heads=4,7", "--multirun"], "nearest valid: model.n_heads=8"),
        (["-m", "train.seed=0,1", "parallel.cp=1,2"], "parallel.cp=2"),
        (["-m", "train.seed=0,1", "run.dir=runs/x"], "with sweep.dir"),
        (["-m", "train.seed=0,1", "mode=generate"], "a sweep trains"),
        (["-m", "train.seed=0,1", "hydra/launcher=basic"], "starts its jobs itself"),
        (["train.seed=0,1"], "add -m"),
        (["--multirn", "train.seed=0,1"], "unrecognized arguments: --multirn"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_sweep_exits_2_before_anything_starts(
    pretrain, overrides, tmp_path, arguments, message
):
    overrides = [s for s in overrides if s.partition("=")[0] not in " ".join(arguments)]
    done = pretrain(*overrides, *arguments)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert done.stdout == ""
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_under_torchrun_exits_2_with_advice(pretrain, overrides, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = pretrain(*overrides, "-m", "train.seed=0,1")
    assert done.returncode == 2
    assert "sweep outside, torchrun inside" in done.stderr
    assert "sweep.nproc_per_node=N" in done.stderr


def test_check_mode_checks_every_job_and_starts_none(pretrain, overrides, tmp_path):
    done = pretrain(*overrides, "-m", "train.seed=range(0,3)", "mode=check")
    assert done.returncode == 0, done.stderr
    assert "3 jobs: the settings are valid" in done.stdout
    assert not (tmp_path / "sweep").exists()


def test_results_are_sorted_and_failures_are_rows(pretrain, overrides, tmp_path):
    """Two learning rates, each with a tokenizer that works and one that cannot be read.

    The same command again runs only unfinished jobs; another config is rejected.
    """
    (tmp_path / "bad.json").write_text("{}")
    sweep = [f"data.tokenizer=null,{tmp_path}/bad.json", "-m", "optim.lr=1e-3,3e-2"]
    done = pretrain(*overrides, *sweep)
    assert done.returncode == 1, done.stderr
    folder = tmp_path / "sweep"
    first, second, *failed = rows(folder)
    assert first["nats_per_byte"] < second["nats_per_byte"]
    assert {first["choices"]["optim.lr"], second["choices"]["optim.lr"]} == {"0.001", "0.03"}
    for row in (first, second):
        summary = json.loads((folder / row["folder"] / "summary.json").read_text())
        assert row["status"] == "finished"
        assert row["nats_per_byte"] == summary["nats_per_byte"]
        assert row["train_seconds"] == summary["train_seconds"]
    assert [row["status"] for row in failed] == ["failed", "failed"]
    assert all("bad.json is not a tokenizer.json" in row["error"] for row in failed)
    assert (folder / "sweep.png").stat().st_size > 10_000
    table = done.stdout[done.stdout.index("┏━", done.stdout.rindex("job 4 of 4")) :]
    heads = table[: table.index("┡")]
    assert all(f" {word} " in heads for word in ("tokenizer", "lr", "nats", "bits", "status"))
    summaries = [json.loads((folder / row["folder"] / "summary.json").read_text())
                 for row in (first, second)]  # fmt: skip
    shown = [f"{x:.4f}" for made in summaries for x in (made["loss"], made["bits_per_byte"])]
    assert re.findall(r"\d+\.\d{4}", table) == shown

    written = folder / first["folder"] / "metrics.jsonl"
    before = written.stat().st_mtime_ns
    again = pretrain(*overrides, *sweep, "run.overwrite=true")  # replaces other runs only
    assert again.returncode == 1
    assert again.stdout.count("finished before") == 2
    assert written.stat().st_mtime_ns == before
    assert [row["status"] for row in rows(folder)] == ["finished"] * 2 + ["failed"] * 2

    other = pretrain(*overrides, *sweep, "data.held_out=0.3")
    assert other.returncode == 2
    settings = r"different settings: data\.held_out was 0\.2, is now 0\.3"
    assert re.search(f"contains a run with {settings}", other.stderr)
    assert written.stat().st_mtime_ns == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_the_job_and_prints_what_is_done(overrides, tmp_path, number):
    """SIGINT to a sweep whose processes are new interpreters, SIGUSR1 to one of forks."""
    arguments = [s for s in overrides if not s.startswith("train.steps")]
    arguments += ["-m", "train.steps=2,100000,3"]
    if number is signal.SIGUSR1:
        process = Fork(arguments)
    else:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, SCRIPT, *arguments], text=True, **pipes)
    metrics = tmp_path / "sweep" / "train.steps=100000" / "metrics.jsonl"
    try:
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        message, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 130
    statuses = {row["choices"]["train.steps"]: row["status"] for row in rows(tmp_path / "sweep")}
    assert statuses == {"2": "finished", "100000": "stopped", "3": "waiting"}
    assert "stopped" in message[message.rindex("┏━") :]
    assert list((metrics.parent / "checkpoints").glob("step-*")), "nothing was saved"
    lines = metrics.read_text().count("\n")
    time.sleep(0.5)
    assert metrics.read_text().count("\n") == lines, "the job still runs"


def test_every_job_may_run_under_its_own_torchrun(pretrain, overrides, tmp_path):
    spread = ["sweep.nproc_per_node=2", "parallel.cp=all"]
    done = pretrain(*overrides, *spread, "-m", "train.seed=4")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "sweep" / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["cp"]) == (2, 2)


PLUGIN = """
import json, os
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

ConfigStore.instance().store(
    group="hydra/sweeper", name="probe", node={"_target_": "hydra_plugins.probe.ProbeSweeper"}
)

class ProbeSweeper(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        results = []
        for lr in (0.001, 0.03):
            job = [*arguments, f"optim.lr={lr}"]
            (result,) = self.launcher.launch([job], initial_job_idx=len(results))
            results.append(result.return_value)
        with open(os.environ["PROBE"], "w") as file:
            json.dump(results, file)
"""


def test_a_sweeper_of_a_plugin_gets_each_result(pretrain, overrides, tmp_path, monkeypatch):
    """It launches a second job after it has the first one's result."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "probe.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PROBE", str(tmp_path / "results.json"))
    done = pretrain(*overrides, "-m", "hydra/sweeper=probe")
    assert done.returncode == 0, done.stderr
    got = json.loads((tmp_path / "results.json").read_text())
    expected = {
        row["choices"]["optim.lr"]: row["nats_per_byte"] for row in rows(tmp_path / "sweep")
    }
    assert got == [expected["0.001"], expected["0.03"]]
    assert all(result > 0 for result in got)


@pytest.fixture
def job(config, monkeypatch) -> Job:
    """A job of 600 steps whose process does nothing and exits 0."""
    monkeypatch.setattr("train.tasks.sweep.run_process", lambda command: (0, []))
    folder = Path(config.run.dir)
    folder.mkdir()
    return Job({}, folder, [], steps=600)


@pytest.mark.parametrize(
    "left",
    [
        None,
        '{"steps": 300, "nats_per_byte": 1.5, "train_seconds": 2.0}',
        '{"steps": 600, "nats',
        "",
    ],
)
def test_a_job_that_was_stopped_early_has_no_result(job, left):
    """A torn summary, or one of fewer steps, is not the result of this job."""
    if left is not None:
        (job.folder / "summary.json").write_text(left)
    Sweep([])._run(job)
    assert (job.status, job.nats_per_byte) == ("stopped", None)
    assert job.error == "not complete; the same sweep continues it"


def test_a_job_that_has_finished_its_steps_has_a_result(job):
    (job.folder / "summary.json").write_text(
        '{"steps": 600, "nats_per_byte": 1.5, "train_seconds": 2.0}'
    )
    Sweep([])._run(job)
    assert (job.status, job.nats_per_byte, job.train_seconds) == ("finished", 1.5, 2.0)


def test_the_last_override_of_a_key_decides_whether_the_sweep_varies_it(monkeypatch):
    """Jobs get the overrides that are not swept, and then their own choices."""

    def launch(_: object, choices: list[dict[str, str]]) -> list[Job]:
        return [Job(own, Path(), [], steps=1) for own in choices]

    task = ["optim.lr=1", "optim.lr=2,3", "train.seed=4,5", "train.seed=6"]
    monkeypatch.setattr("train.tasks.sweep._without_hydra", lambda config: config)
    launcher = ProcessLauncher(mock.Mock(launch=launch))
    launcher.setup(
        hydra_context=mock.Mock(),
        config=OmegaConf.create({"hydra": {"overrides": {"task": task}}}),
    )
    jobs = launcher.launch([["optim.lr=1", "optim.lr=2", "train.seed=4", "train.seed=6"]], 0)
    assert [job.overrides for job in jobs] == [["optim.lr"]]


def test_two_jobs_of_the_same_settings_run_once(job, monkeypatch):
    commands = []

    def run(command: list[str]) -> tuple[int, list[str]]:
        commands.append(command)
        (job.folder / "summary.json").write_text(
            '{"steps": 600, "nats_per_byte": 1.5, "train_seconds": 2.0}'
        )
        return 0, []

    monkeypatch.setattr("train.tasks.sweep.run_process", run)
    sweep = Sweep([])
    sweep.folder = job.folder
    twice = iter([job, dataclasses.replace(job)])
    monkeypatch.setattr(sweep, "_plan", lambda *_: next(twice))
    jobs = sweep.launch([mock.Mock(), mock.Mock()], [{}, {}])
    assert [job.status for job in jobs] == ["finished", "finished"]
    assert len(commands) == 1


@pytest.mark.parametrize("left", ['{"steps": 30', '{"steps": 100}'])
def test_a_torn_summary_or_one_of_fewer_steps_does_not_finish_a_job(config, left):
    folder = RunFolder(config)
    folder.path.mkdir()
    folder.config.write_text(json.dumps(dataclasses.asdict(config)))
    folder.metrics.touch()
    folder.summary.write_text(left)
    assert not Sweep([])._is_finished(folder.path, config)
    folder.summary.write_text(f'{{"steps": {config.train.steps}}}')
    assert Sweep([])._is_finished(folder.path, config)


def test_every_job_has_its_own_folder_name():
    plain = ["train.seed=0", "optim.lr=0.001"]
    assert folder_name(plain) == "train.seed=0,optim.lr=0.001"
    odd = [["data.path=/a/b"], ["data.path=/a_b"], ["data.path=_a_b"], ["x=" + "y" * 300], []]
    names = [folder_name(choices) for choices in odd]
    assert len(set(names)) == len(odd)
    assert all(0 < len(name.encode()) < 200 and os.sep not in name for name in names)


@pytest.mark.parametrize(
    "value", ["/plain", "/with space, and='quotes'", "back\\slash", "\\'", "a\\"]
)
def test_quoted_values_are_parsed_unchanged(value):
    (override,) = OverridesParser.create().parse_overrides([f"run.dir={quoted(value)}"])
    assert override.value() == value
