"""If this fails, masks give wrong results on GPUs. Random masks on one GPU and on several, against
float64 on the GPU: `pytest -m gpu`."""

from __future__ import annotations

import random

import pytest
import torch

from ringfa3 import flash_attn_mask_func, plan_context
from ringfa3.kernels import dispatch
from tests.support.dense import gradients
from tests.support.gpus import spawn, worlds
from tests.support.mask_checks import case_of, dense_results, dsink_size, hold_gate
from tests.support.ring_checks import check_ring

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_random_masks_hold_the_gate() -> None:
    """300 masks; every second one is deterministic, and repeats its gradients bit for bit."""
    rng = random.Random(43)
    for number in range(300):
        union, given = case_of(rng, number)
        (q, k, v, *sink), dout, dlse = given
        if len(q) and len(k):
            assert dispatch.unit_for("forward", q) is not None
        deterministic, results = bool(number % 2), []
        for _ in range(1 + deterministic):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, *sink)]
            outputs = flash_attn_mask_func(
                *leaves[:3],
                union.mask(),
                sink=leaves[3] if sink else None,
                return_lse=True,
                deterministic=deterministic,
            )
            assert isinstance(outputs, tuple)
            results.append([*outputs, *gradients(leaves, outputs, dout, dlse)])
        plain, exact = (dense_results(union, given, x) for x in (q.dtype, torch.float64))
        what = f"case {number}: {union}, {q.dtype}, d {q.shape[2]}"
        hold_gate(results[0], plain, exact, dsink_size(exact, given), what)
        for x, y in zip(results[0], results[-1], strict=True):
            assert torch.equal(x, y), f"{what}: two runs differ"


def _worker(rank: int, world: int) -> None:
    rng = random.Random(world)
    for number in range(50):
        union, given = case_of(rng, number)
        plan = plan_context(union.mask(), layout=rng.choice(("zigzag", "contiguous")))
        transport = ("nccl", "symmetric")[number // 2 % 2]
        what = f"rank {rank}, case {number}: {union}, {given[0][0].dtype}"
        check_ring(plan, union, given, transport, bool(number % 2), what)


@worlds(2, 4, soak=(3,))
def test_rings_hold_the_gate(world: int) -> None:
    """50 masks, over NCCL and `symmetric`."""
    spawn(_worker, world)
