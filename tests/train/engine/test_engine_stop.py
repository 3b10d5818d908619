"""If this fails, a job that is stopped loses its last steps. SIGTERM during a step of a sharded
engine: saved concurrently with the step, exit code 0.

The reference is a run of ddp without a stop: the steps after the stop agree within 1e-5.
"""

from __future__ import annotations

import signal
import time
from importlib.util import find_spec

import pytest
import torch

from tests.train.jobs import HANG_S, events, run_ranks, start_ranks, steps
from train.data.manifest import verify
from train.engine.stored_checkpoint import checkpoints_in

STEPS = 3
ENGINES = [
    pytest.param(["engine=fsdp2"], marks=pytest.mark.soak, id="fsdp2"),  # zero-3 runs in CI
    *(
        pytest.param(
            ["engine=deepspeed", f"engine.stage={stage}"],
            marks=[
                pytest.mark.deepspeed,
                pytest.mark.skipif(find_spec("deepspeed") is None, reason="not installed"),
                *([pytest.mark.soak] if stage < 3 else []),
            ],
            id=f"zero-{stage}",
        )
        for stage in (1, 2, 3)
    ),
]


@pytest.fixture(scope="module")
def overrides(overrides) -> list[str]:
    slow = [f"train.steps={STEPS}", "train.global_batch_size=16", "model.zero_init=false"]
    return [*overrides, *slow, "parallel.cp=2", "train.eval_every=0", "checkpoint.every=0"]


@pytest.fixture(scope="module")
def undisturbed(overrides, tmp_path_factory) -> list[tuple[int, float, float]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_ranks(2, *overrides, f"run.dir={folder}", "train.final_eval_bytes=1")
    return steps(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_sigterm_in_the_middle_of_a_step(overrides, undisturbed, tmp_path, engine):
    """The ranks compute the next of the step's 16 micro-batches while the stopper saves."""
    folder = tmp_path / "run"
    command = [*overrides, *engine, f"run.dir={folder}", "train.final_eval_bytes=1"]
    ranks = start_ranks(command, command)
    try:
        deadline = time.monotonic() + HANG_S
        while not steps(folder):
            assert all(rank.poll() is None for rank in ranks)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        begin = time.monotonic()
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        output = [rank.communicate(timeout=25)[1] for rank in ranks]
        assert time.monotonic() - begin < 25
        assert [rank.returncode for rank in ranks] == [0, 0], output
    finally:
        for rank in ranks:
            rank.kill()
    done = len(steps(folder))
    assert done < STEPS
    assert list(checkpoints_in(folder / "checkpoints")) == [done]
    verify(folder / "checkpoints" / f"step-{done:08d}")
    assert events(folder)[-1].startswith(f"SIGTERM: stopped after step {done}, which is saved")
    run_ranks(2, *overrides, f"run.dir={folder}", "train.final_eval_bytes=1")
    found, expected = (torch.tensor([s[1:] for s in run]) for run in (steps(folder), undisturbed))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
