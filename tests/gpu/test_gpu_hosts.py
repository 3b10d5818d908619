"""If this fails, rings over several hosts give wrong results. Rings over NCCL of several hosts, on
the GPUs of one: `pytest -m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpus import as_host, require_gpus, spawn, worlds
from tests.support.ranks import free_port
from tests.support.two_levels import check_two_levels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
LIMIT_S = 200


def _hosts(rank: int, world: int) -> None:
    """Three hosts of a GPU each, or two hosts."""
    os.environ["RINGFA3_HOSTS"] = hosts = "3" if world == 3 else "2"
    check_two_levels(world, int(hosts))


@worlds(2, 3, 4, 8)
def test_hosts_by_name(world: int) -> None:
    """As `check_two_levels`; NCCL itself takes the GPUs for those of one host."""
    spawn(_hosts, world)


def _copying_hosts(rank: int, world: int) -> None:
    os.environ["RINGFA3_HOSTS"] = "2"
    check_two_levels(world, 2, "symmetric")


@worlds(4, 8)
def test_ranks_of_a_host_copy(world: int) -> None:
    """As `check_two_levels`, over copies inside each of two hosts by name."""
    spawn(_copying_hosts, world)


@worlds(2, 4, 8)
def test_two_agents_of_torchrun(world: int) -> None:
    """As `check_two_levels`. NCCL takes the agents for hosts; plans know of them by torchrun."""
    require_gpus(world)
    of_one = world // 2
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(of_one)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agents = [
        subprocess.Popen(
            [sys.executable, *launcher, "--node-rank", str(n), "-m", "tests.support.two_levels"],
            env={**os.environ, **as_host(n, range(n * of_one, (n + 1) * of_one))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for n in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=LIMIT_S)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
            agent.wait(30)
