"""If this fails, training over two hosts computes something else than on one. Two torchrun agents
as on two hosts: `pytest -m gpu tests/train/engine/test_gpu_two_hosts.py`.

Each agent has one process, with a GPU of its own where there are two; one GPU serves both. NCCL
takes the agents for two hosts and moves everything by sockets, K/V of the ring included. The
reference is one process. Tolerance: each loss within 0.1%, each gradient norm within 1%; bfloat16
itself rounds by up to 0.2 to 0.4%.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.support.gpus import as_host
from tests.train.jobs import Job, events, steps
from tests.train.texts import long_text
from tests.train.two_hosts import two_hosts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = 20
EVERY = 5  # steps between checkpoints
ENGINES = {
    "ddp": ["engine=ddp"],
    "fsdp2": ["engine=fsdp2"],
    **{f"zero-{n}": ["engine=deepspeed", f"engine.stage={n}"] for n in (1, 2, 3)},
}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="no deepspeed")
ENGINE_CASES = [
    pytest.param(keys, id=name, marks=needs_deepspeed if "zero" in name else ())
    for name, keys in ENGINES.items()
]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    """A small model with heads of 128; a step has two samples of one document each."""
    return [
        *long_text(tmp_path_factory.mktemp("long") / "text"),
        *("data.seq_len=8192", "parallel.device=cuda", "parallel.transport=nccl"),
        *("model.dim=512", "model.n_heads=4", "model.head_dim=128", "model.n_layers=4"),
        *("model.ffn_dim=1024", "model.zero_init=false", "train.precision=bfloat16"),
        *(
            "train.global_batch_size=2",
            f"train.steps={STEPS}",
            "train.eval_every=0",
            "optim.lr=3e-4",
        ),
        *("train.final_eval_bytes=1", f"checkpoint.every={EVERY}", "parallel.timeout_s=60"),
    ]


@pytest.fixture(scope="module")
def expected(arguments, tmp_path_factory) -> list[tuple[int, float, float]]:
    """The steps of one process on one GPU."""
    folder = tmp_path_factory.mktemp("one") / "run"
    with Job(folder, 1, *arguments, fresh=True) as job:
        job.finish()
    return steps(folder)


def environment(agent: int) -> dict[str, str]:
    """Of an agent with one GPU."""
    return as_host(agent, [agent % torch.cuda.device_count()])


def compare(
    found: list[tuple[int, float, float]], expected: list[tuple[int, float, float]]
) -> None:
    """The same steps within the tolerance; prints the largest differences."""
    assert [step for step, _, _ in found] == list(range(1, STEPS + 1))
    pairs = list(zip(found, expected, strict=True))
    loss, norm = (max(abs(a[n] / b[n] - 1) for a, b in pairs) for n in (1, 2))
    print(f"\n{STEPS} steps beside one process: loss {loss:.1e}, gradient norm {norm:.1e}")
    assert loss <= 1e-3
    assert norm <= 1e-2


@pytest.mark.parametrize("cp", [1, 2])
def test_two_agents_compute_what_one_process_does(arguments, expected, tmp_path, cp):
    folder, environments = tmp_path / "run", [environment(agent) for agent in range(2)]
    with two_hosts(folder, *arguments, f"parallel.cp={cp}", environments=environments) as job:
        job.finish()
    compare(steps(folder), expected)


@pytest.mark.parametrize("engine", ENGINE_CASES)
def test_a_killed_agent_recovers(arguments, expected, tmp_path, engine):
    """Agent and process are killed after the first checkpoint, and a new agent joins."""
    folder, environments = tmp_path / "run", [environment(agent) for agent in range(2)]
    keys = *arguments, "parallel.cp=2", *engine
    with two_hosts(folder, *keys, environments=environments, replaceable=True) as job:
        first = folder / "checkpoints" / f"step-{EVERY:08d}"
        job.agents[0].until(first.exists)
        job.replace(1)
        job.finish()
    (event,) = events(folder)[1:]
    assert event.startswith("continues after step ")
    compare(steps(folder), expected)
