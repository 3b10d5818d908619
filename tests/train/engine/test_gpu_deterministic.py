"""If this fails, deterministic runs on GPUs differ from each other. ``train.deterministic`` on
GPUs: `pytest -m gpu -s tests/train/engine/test_gpu_deterministic.py`.

Whole runs under torchrun on 2 GPUs at cp 2, or on one. The test prints tokens/s of a run with the
key and of a run without it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
from pathlib import Path

import pytest
import torch

from tests.train.jobs import Job, events, steps
from tests.train.texts import long_text

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

STEPS = 30
KILLED_AFTER = 15
WARM_UP = 5  # steps whose speed does not count


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    """A small model with heads of 128 over documents of about 20k tokens, two in each sample."""
    text = long_text(tmp_path_factory.mktemp("long") / "text")
    cp = min(torch.cuda.device_count(), 2)
    return [
        *text,
        *("data.seq_len=32768", f"parallel.cp={cp}", "parallel.device=cuda"),
        *("model.dim=512", "model.n_heads=4", "model.head_dim=128", "model.n_layers=4"),
        *("model.ffn_dim=1024", "train.precision=bfloat16", "train.eval_every=0"),
        *(f"train.steps={STEPS}", "train.final_eval_bytes=1", "checkpoint.every=4"),
    ]


def run(folder: Path, *arguments: str) -> str:
    """Run to the end; returns the output."""
    with Job(folder, min(torch.cuda.device_count(), 2), *arguments, fresh=True) as job:
        code, output = job.end(limit=400)
        assert code == 0, output
    return output


def tokens_per_s(folder: Path) -> float:
    """The median over the steps after the warm-up."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()[WARM_UP:]
    return statistics.median(json.loads(line)["tokens_per_s"] for line in lines)


def test_a_killed_run_goes_on_bit_equal(arguments, tmp_path):
    """SIGKILL of every rank after 15 of 30 steps: every loss and gradient norm is the same bits."""
    deterministic = [*arguments, "train.deterministic=true"]
    whole, killed, free = (tmp_path / name for name in ("whole", "killed", "free"))
    output = run(whole, *deterministic)
    assert output.count("torch.use_deterministic_algorithms") == 1
    assert "barrier()" not in output
    assert "destroy_process_group() was not called" not in output
    with Job(killed, min(torch.cuda.device_count(), 2), *deterministic, fresh=True) as job:
        job.await_step(KILLED_AFTER)
        for pid in job.pids():
            os.kill(pid, signal.SIGKILL)
        job.end()
    assert KILLED_AFTER <= len(steps(killed)) < STEPS
    run(killed, *deterministic)
    assert events(killed)[-1].startswith("continues after step ")
    run(free, *arguments)
    slow, fast = tokens_per_s(whole), tokens_per_s(free)
    print(
        f"\n{torch.cuda.get_device_name()} x {min(torch.cuda.device_count(), 2)}: deterministic "
        f"{slow:,.0f} tokens/s, free {fast:,.0f} tokens/s, ratio {slow / fast:.3f}"
    )
    assert [step for step, _, _ in steps(whole)] == list(range(1, STEPS + 1))
    assert steps(killed) == steps(whole)
