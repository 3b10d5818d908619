"""If this fails, a profile lacks its steps, or profiling slows all other steps. Profiling: the
steps in a trace, the ranks that write one, and no profiler at all when off."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch

from train.config import ConfigError, ProfileConfig
from train.data.shards import open_corpus
from train.engine.parallel import ParallelLayout
from train.log.profiler import MemoryHistory, profiled, require_profilable
from train.run.failure import FailureReport
from train.run.run_folder import RunFolder
from train.tasks.trainer import Trainer

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run_steps(profile: ProfileConfig, folder: Path, rank: int = 0, first: int = 1):
    """Steps ``first`` to 6; step n adds a tensor of n * 1000 rows, its mark in the trace."""
    with profiled(profile, folder, rank, CPU, first - 1) as step_done:
        for step in range(first, 7):
            torch.ones(step * 1000) + 1
            step_done()


def traced_steps(path: Path) -> list[int]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    shapes = [e["args"]["Input Dims"][0] for e in events if e["name"] == "aten::add"]
    return [shape[0] // 1000 for shape in shapes]


@pytest.mark.parametrize(
    ("steps", "begin", "expected"),
    [([3, 4], 1, [3, 4]), ([1, 1], 1, [1]), ([2, 6], 1, [2, 3, 4, 5, 6]), ([3, 6], 5, [5, 6])],
    ids=["inside", "first", "last", "resumed"],
)
def test_the_trace_holds_exactly_the_steps(tmp_path, steps, begin, expected):
    run_steps(ProfileConfig(steps=steps), tmp_path, first=begin)
    (path,) = tmp_path.iterdir()
    assert path.name == f"steps{expected[0]}-{expected[-1]}-rank0.json.gz"
    assert traced_steps(path) == expected


def test_a_failing_step_leaves_the_trace_so_far(tmp_path):
    def fail_in_step_3() -> None:
        with profiled(ProfileConfig(steps=[2, 5]), tmp_path, 0, CPU, 0) as step_done:
            for step in (1, 2, 3):
                torch.ones(step * 1000) + 1
                if step == 3:
                    raise RuntimeError("step 3")
                step_done()

    with pytest.raises(RuntimeError, match="step 3"):
        fail_in_step_3()
    assert traced_steps(next(tmp_path.iterdir())) == [2, 3]


@pytest.mark.parametrize(
    ("profile", "rank", "first"),
    [
        (ProfileConfig(), 0, 1),
        (ProfileConfig(steps=[2, 3], ranks=[0, 2]), 1, 1),
        (ProfileConfig(steps=[2, 3]), 0, 4),
    ],
    ids=["off", "another rank", "steps long done"],
)
def test_off_starts_no_profiler(tmp_path, monkeypatch, profile, rank, first):
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: pytest.fail("a profiler was made"))
    run_steps(profile, tmp_path / "profile", rank, first)
    assert not (tmp_path / "profile").exists()


def test_a_memory_history_needs_cuda():
    require_profilable(ProfileConfig(memory=True), torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"profile\.memory=true.*nearest valid"):
        require_profilable(ProfileConfig(memory=True), CPU)


def test_the_history_covers_the_profiled_steps_and_ends_once(tmp_path, monkeypatch):
    """Against a fake that records torch's allocator calls."""
    calls, step = [], 0
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **kw: calls.append((step, kw)))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append((step, path)))
    with profiled(ProfileConfig(steps=[3, 4], memory=True), tmp_path, 0, CPU, 0) as step_done:
        for step in range(1, 7):  # noqa: B007 (the stand-ins read it)
            step_done()
    (after, begin), (written, path), (ended, end) = calls
    assert (after, written, ended) == (2, 4, 4)
    assert begin["max_entries"] > 0
    assert path == str(tmp_path / "memory-rank0.pickle")
    assert end == {"enabled": None}


@pytest.mark.gpu
def test_a_memory_snapshot_on_the_gpu(tmp_path):
    history = MemoryHistory(tmp_path / "memory.pickle")
    history.set(recording=True)
    kept = torch.ones(12345, device="cuda")
    history.close()
    assert kept.is_cuda
    assert (tmp_path / "memory.pickle").stat().st_size > 1000


def test_a_trace_of_training_has_its_own_steps(config):
    """Steps 2 and 3 of a run of four: the optimiser's op is in the trace twice."""
    config.model.dim, config.model.ffn_dim, config.model.n_layers = 32, 64, 1
    config.train.steps, config.optim.warmup_steps, config.train.eval_every = 4, 1, 0
    config.profile.steps = [2, 3]
    folder = RunFolder(config)
    parallel = ParallelLayout(rank=0, world=1, cp=1, device=CPU)
    trainer = Trainer(
        config, open_corpus(config.data), parallel, folder, FailureReport(0, sys.stderr)
    )
    trainer.train()
    trainer.close()
    (path,) = folder.profile.iterdir()
    assert path.name == "steps2-3-rank0.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
