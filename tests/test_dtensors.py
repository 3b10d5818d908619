"""If this fails, a DTensor gives wrong numbers instead of an error. A DTensor in place of a rank's
tokens is refused everywhere, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ringfa3 import (
    RingFA3Attention,
    flash_attn_func,
    flash_attn_varlen_func,
    plan_context,
    ring_attn_func,
)
from tests.support.ranks import Ranks


def _texts(group: dist.ProcessGroup) -> dict[str, str]:
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = plan_context(22, group)
    x = torch.ones(plan.local_tokens, 2, 8)
    d = distribute_tensor(torch.ones(22, 2, 8), mesh, [Shard(0)])
    sink = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    layer = RingFA3Attention(2, 2, 8, group=group)
    cu = [0, 11]
    uses: dict[str, Callable[[], Any]] = {
        "q": lambda: flash_attn_func(d[None], x[None], x[None]),
        "k": lambda: flash_attn_varlen_func(x, d, x, cu, cu),
        "v": lambda: ring_attn_func(x, x, d, plan),
        "sink": lambda: ring_attn_func(x, x, x, plan, sink=sink),
        "q ": lambda: layer(d, x, x, plan),
        "k ": lambda: layer(x[None], d[None], x[None]),
        "x": lambda: plan.shard(d),
        "x_local": lambda: plan.unshard(d),
    }
    texts = {}
    for name, use in uses.items():
        with pytest.raises(TypeError, match="is a DTensor") as raised:
            use()
        texts[name] = str(raised.value)
    y = d.to_local()
    torch.testing.assert_close(ring_attn_func(y, y, y, plan), torch.ones(11, 2, 8))
    return texts


def test_dtensors_are_refused_with_the_remedy(ranks: Ranks) -> None:
    for texts in ranks.run(2, _texts):
        for name, text in texts.items():
            assert f"{name.strip()} is a DTensor: pass {name.strip()}.to_local()" in text


def _one_rank(group: dist.ProcessGroup) -> str:
    """Only rank 1 is wrong; all raise."""
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = plan_context(22, group)
    x = torch.ones(plan.local_tokens, 2, 8)
    d = distribute_tensor(torch.ones(22, 2, 8), mesh, [Shard(0)])
    with pytest.raises(TypeError) as raised:
        ring_attn_func(x, x, d if dist.get_rank() else x, plan)
    return str(raised.value)


def test_a_dtensor_on_one_rank_raises_on_all(ranks: Ranks) -> None:
    for text in ranks.run(2, _one_rank):
        assert "rank 1: v is a DTensor: pass v.to_local()" in text
