"""If this fails, ranks that connect wait for ranks of another group. When ranks of a CP group
connect: alone, whatever other ranks of the job do meanwhile."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import ringfa3
from ringfa3 import RingFA3Attention, plan_context, ring_attn_func
from ringfa3.ring import process_group
from tests.support.ranks import Ranks, sacrifice

TOKENS = 22


def _lse(group: Any) -> float:
    """LSE of a full mask over ones: log of the tokens plus the equal scores."""
    plan = plan_context(TOKENS, group, causal=False)
    x = torch.ones(plan.local_tokens, 2, 8, requires_grad=True)
    out, lse = ring_attn_func(x, x, x, plan, return_lse=True)
    out.sum().backward()
    return float((lse.detach() - 8**0.5).exp().mean())


def _pipeline(_: dist.ProcessGroup, early: bool) -> tuple[float, float]:
    """Two stages of two ranks. Stage 1 enters its ring when it has the activations of stage 0,
    stage 0 its second step when it has the gradients of stage 1."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    stage, peer = rank // 2, (rank + 2) % 4
    if stage == 1:
        dist.new_group([2, 3], use_local_synchronization=True)  # groups number 5 here, 4 there
    if early:
        assert ringfa3.connect(mesh["cp"]) == "gloo"
    x, sums = torch.zeros(3), []
    for _step in range(2):
        if stage == 1:
            dist.recv(x, peer)
        sums.append(_lse(mesh["cp"]))
        if stage == 0:
            time.sleep(0.3)
            dist.send(x, peer)
            dist.recv(x, peer)
        else:
            dist.send(x, peer)
    return sums[0], sums[1]


@pytest.mark.parametrize("early", [False, True])
def test_a_pipeline_of_context_groups_finishes(early: bool) -> None:
    """Connecting takes part in no collective of the job; stages connect at different times."""
    for sums in sacrifice(4, 15.0, _pipeline, early):
        assert sums == pytest.approx((TOKENS, TOKENS), rel=1e-5)


def _registered(group: dist.ProcessGroup) -> bool:
    """Whether a ring call, and `connect`, leave PyTorch's tables of groups as they were."""
    world = c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag)
    before = [dict(table) for table in tables]
    count = world.group_count
    assert ringfa3.connect(group, "cpu") == "gloo"
    _lse(group)
    return [dict(table) for table in tables] == before and world.group_count == count


def test_pytorch_does_not_know_the_rings_own_groups(ranks: Ranks) -> None:
    """So the names and numbers of a user's later groups are the same on all ranks of the job."""
    assert ranks.run(3, _registered) == [True] * 3


def test_a_bound_default_group_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicator has no parent, although the default group has a `device_id`. PyTorch's
    class stands in by its arguments: it is not in CPU builds."""
    made: list[Any] = []

    class Nccl:
        class Options(SimpleNamespace):
            pass

        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

    default = SimpleNamespace(bound_device_id=torch.device("cuda:0"))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist.ProcessGroup, "_register_backend", lambda *_: None)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: default)
    limit = timedelta(seconds=7)
    process_group.new_group([5, 7], 1, "nccl", dist.HashStore(), "own", limit)
    ((_, rank, world, options),) = made
    assert (rank, world, options._timeout) == (1, 2, limit)
    assert options.is_high_priority_stream
    assert not hasattr(options, "split_from")


def _connect(group: dist.ProcessGroup, which: str) -> str:
    """The outcome of `connect` where rank 1 differs."""
    wrong = dist.get_rank(group) == 1
    try:
        if which == "absent" and wrong:
            time.sleep(3.0)
            return "absent"
        transport = "nccl" if which == "transport" and wrong else "auto"
        device = "nowhere" if which == "device" and wrong else None
        if which == "hosts" and wrong:
            os.environ["RINGFA3_HOSTS"] = "3"
        if which == "ring call" and wrong:
            return str(_lse(group))
        return str(ringfa3.connect(group, device, transport))
    except (ValueError, RuntimeError) as problem:
        return str(problem)


def test_a_wrong_argument_of_connect_raises_on_all_ranks() -> None:
    for said in sacrifice(2, 10.0, _connect, "transport"):
        assert "rank 1: transport='nccl' cannot move cpu tensors" in said
    for said in sacrifice(2, 10.0, _connect, "device"):
        assert "rank 1: RuntimeError: Expected one of cpu" in said
    for said in sacrifice(2, 10.0, _connect, "hosts"):
        assert "rank 1: RINGFA3_HOSTS=3: it must divide 2 ranks" in said
    for said in sacrifice(2, 10.0, _connect, "ring call"):
        assert "differs between the ranks of the CP group" in said
    said, _ = sacrifice(2, 2.0, _connect, "absent")
    assert "rank 1 did not reach it within 2 s" in said


def test_connect_needs_a_group() -> None:
    assert ringfa3.connect() is None  # one process
    with pytest.raises(ValueError, match=r"group=\(0, 2\): connect needs a ProcessGroup"):
        ringfa3.connect((0, 2))


def _meshes(_: dist.ProcessGroup) -> list[str]:
    """A mesh wherever a group is taken; texts of meshes that have no one group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = mesh["cp"]
    group = cp.get_group()
    assert plan_context(TOKENS, cp) is plan_context(TOKENS, group)
    assert _lse(cp) == pytest.approx(TOKENS, rel=1e-5)
    assert ringfa3.connect(cp) == "gloo"
    layer = RingFA3Attention(2, 2, 8, group=cp, causal=False)
    x = torch.arange(11.0)[:, None, None].expand(11, 2, 8).contiguous()
    plan = plan_context(TOKENS, (dist.get_rank(group), 2), causal=False)
    mean = layer(x, x, x, plan)
    expected = RingFA3Attention(2, 2, 8, group=group, causal=False)(x, x, x, plan)
    assert torch.equal(mean, expected)
    texts = []
    for wrong in (mesh, init_device_mesh("cpu", (2, 2))):
        for use in (
            lambda m: plan_context(TOKENS, m),
            lambda m: RingFA3Attention(2, 2, 8, group=m),
            ringfa3.connect,
        ):
            with pytest.raises(ValueError, match="group: a DeviceMesh of 2 dimensions") as raised:
                use(wrong)
            texts.append(str(raised.value))
    return texts


def test_a_mesh_of_one_dimension_is_a_group(ranks: Ranks) -> None:
    for texts in ranks.run(4, _meshes):
        assert all("('dp', 'cp')" in t and "group=mesh['cp']" in t for t in texts[:3])
        assert all("mesh_dim_names" in text for text in texts[3:])


def _outside(_: dist.ProcessGroup) -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="this process is not a member"):
            plan_context(TOKENS, group)  # type: ignore[arg-type]


def test_a_rank_outside_of_the_group_is_told_so(ranks: Ranks) -> None:
    ranks.run(4, _outside)
