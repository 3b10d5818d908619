"""Checks of rings on GPUs or, over gloo, on CPUs: against dense float64, and rows of buffers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

from ringfa3 import ContextPlan, plan_context, ring_attn_func
from ringfa3.ring import p2p_pass
from tests.support.dense import gradients
from tests.support.mask_checks import NAMES, Given, dense_results, dsink_size, hold_gate
from tests.support.masks import Union

KV, DKV = 3, 4  # dimensions of buffers: K or V, and dK and dV together


@contextmanager
def counted_rows(heads: tuple[int, ...]) -> Iterator[Counter[int]]:
    """By `KV` and `DKV`: rows of the tensors that a pass by messages allocates meanwhile.

    heads: (KV heads, head_dim) of K. Kernels allocate dK and dV of these shapes, too; only tensors
    of the pass's module count.
    """
    rows: Counter[int] = Counter()
    new_empty = torch.Tensor.new_empty

    def counted(x: torch.Tensor, shape: int | tuple[int, ...], **options: object) -> torch.Tensor:
        by_pass = sys._getframe(1).f_globals["__name__"] == p2p_pass.__name__
        if by_pass and not isinstance(shape, int) and tuple(shape[-2:]) == tuple(heads):
            rows[len(shape)] += shape[0]
        return new_empty(x, shape, **options)  # type: ignore[call-overload, no-any-return]

    with patch.object(torch.Tensor, "new_empty", counted):
        yield rows


def least_budget(*given: object, **options: object) -> int:
    """Of rank 0, from the error of a budget of one row; 1 if that is enough."""
    try:
        plan_context(*given, **options, kv_budget=1)  # type: ignore[arg-type]
    except ValueError as error:
        return int(str(error).rpartition("give kv_budget=")[2].removesuffix(" or more"))
    return 1


def check_ring(
    plan: ContextPlan, union: Union, given: Given, transport: str, deterministic: bool, what: str
) -> list[Counter[int]]:
    """A ring under the mask of a union, on its shards of `given`, holds the gate.

    Returns the `counted_rows` of its forward and of its backward.
    """
    (q, k, v, *sink), dout, dlse = given
    leaves = [plan.shard(q), plan.shard_keys(k), plan.shard_keys(v), *sink]
    leaves = [x.clone().requires_grad_() for x in leaves]
    with counted_rows(k.shape[1:]) as forward:
        outputs = ring_attn_func(
            *leaves[:3],
            plan,
            sink=leaves[3] if sink else None,
            return_lse=True,
            deterministic=deterministic,
            transport=transport,
        )
    assert isinstance(outputs, tuple)
    with counted_rows(k.shape[1:]) as backward:
        found = gradients(leaves, outputs, plan.shard(dout), plan.shard(dlse, 1))
    got = [*outputs, *found]
    if sink:
        dist.all_reduce(got[5])
    results = [dense_results(union, given, x) for x in (q.dtype, torch.float64)]
    size = dsink_size(results[1], given)
    for whole in results:
        for i, x in enumerate(whole[:5]):
            cut = plan.shard_keys if NAMES[i] in ("dk", "dv") else plan.shard
            whole[i] = cut(x, 1 if NAMES[i] == "lse" else 0)
    hold_gate(got, *results, size, what)
    return [forward, backward]
