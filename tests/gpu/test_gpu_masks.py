"""If this fails, masks give wrong results on GPUs. Random masks on one GPU and on several, against
float64 on the GPU: `pytest -m gpu`."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from ringfa3 import flash_attn_mask_func, plan_context, ring_attn_func
from ringfa3.kernels import dispatch
from tests.support.dense import gradients
from tests.support.gpus import spawn, worlds
from tests.support.mask_checks import NAMES, case_of, dense_results, dsink_size, hold_gate

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
        (q, k, v, *sink), dout, dlse = given
        plan = plan_context(union.mask(), layout=rng.choice(("zigzag", "contiguous")))
        leaves = [plan.shard(q), plan.shard_keys(k), plan.shard_keys(v), *sink]
        leaves = [x.clone().requires_grad_() for x in leaves]
        outputs = ring_attn_func(
            *leaves[:3],
            plan,
            sink=leaves[3] if sink else None,
            return_lse=True,
            deterministic=bool(number % 2),
            transport=("nccl", "symmetric")[number // 2 % 2],
        )
        assert isinstance(outputs, tuple)
        got = [*outputs, *gradients(leaves, outputs, plan.shard(dout), plan.shard(dlse, 1))]
        if sink:
            dist.all_reduce(got[5])
        results = [dense_results(union, given, x) for x in (q.dtype, torch.float64)]
        size = dsink_size(results[1], given)
        for whole in results:
            for i, x in enumerate(whole[:5]):
                cut = plan.shard_keys if NAMES[i] in ("dk", "dv") else plan.shard
                whole[i] = cut(x, 1 if NAMES[i] == "lse" else 0)
        hold_gate(got, *results, size, f"rank {rank}, case {number}: {union}, {q.dtype}")


@worlds(2, 4, soak=(3,))
def test_rings_hold_the_gate(world: int) -> None:
    """50 masks, over NCCL and `symmetric`."""
    spawn(_worker, world)
