"""If this fails, results on a GPU depend on PyTorch's defaults, modes or streams. States of PyTorch
that must change no bit of a result, on one GPU and several: `pytest -m gpu`.

The reference of each call is the same call outside of the state; the tolerance is 0. Each call runs
three times under a state and outside: the host library records the second and replays the third.
"""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from ringfa3 import host
from tests.support import ambient
from tests.support.gpus import spawn, worlds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# cuBLAS reads it at its first use; PyTorch's deterministic mode demands it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ORDERS = pytest.mark.parametrize("state_first", [True, False], ids=["state first", "state last"])
OF_RINGS = ("bfloat16", "default device", "inference", "deterministic")


@ORDERS
@pytest.mark.parametrize("state", ambient.STATES)
def test_one_gpu_computes_the_same_bits(state: str, state_first: bool) -> None:
    seed = 2 * list(ambient.STATES).index(state) + state_first
    unequal = []
    for starts in host.HOSTS:
        host.select(starts)
        calls = ambient.attention_calls("cuda", seed) | ambient.ring_calls("cuda", seed)
        calls |= ambient.model_calls("cuda", seed)
        unequal += [f"{starts}: {x}" for x in ambient.check(calls, state, state_first)]
    assert unequal == []


def _worker(rank: int, world: int) -> None:
    unequal = []
    for number, state in enumerate(OF_RINGS):
        for state_first in (True, False):
            for transport in ("symmetric", "nccl"):
                # a new group has its first buffers, signals and streams under the state
                group = dist.new_group(list(range(world)))
                seed = 2 * number + state_first
                calls = ambient.ring_calls("cuda", seed, group, transport)
                found = ambient.check(calls, state, state_first)
                unequal += [f"{state}, {transport}: {x}" for x in found]
    assert unequal == [], "\n".join(unequal)


@worlds(2, soak=(4,))
def test_rings_compute_the_same_bits(world: int) -> None:
    spawn(_worker, world)
