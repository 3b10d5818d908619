"""If this fails, groups that end keep GPU memory or communicators, until a job runs out of them.
What groups take on GPUs, and give back: communicators of their own and shared memory."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import ringfa3
from ringfa3 import plan_context, ring_attn_func
from ringfa3.ring.process_group import end_group, new_group
from tests.support.gpus import Worker, spawn, worlds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

ROUNDS = 20
SLACK_BYTES = 4 << 20  # of device memory: a driver's pools may grow by a page or two


def _call(group: dist.ProcessGroup, transport: str) -> None:
    """Forward and backward of ones under a full mask: LSE is that of equal scores, within 1e-2."""
    plan = plan_context(1024, group, causal=False)
    x = torch.ones(plan.local_tokens, 4, 64, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    out, lse = ring_attn_func(x, x, x, plan, return_lse=True, transport=transport)
    out.sum().backward()
    expected = torch.full_like(lse, 8.0 + torch.tensor(1024.0).log().item())
    torch.testing.assert_close(lse, expected, atol=1e-2, rtol=0)


def _held() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "python threads": threading.active_count(),
        "groups": len(c10d._world.pg_map),
        "device bytes": total - free,
    }


def _rounds(rank: int, world: int, transport: str) -> None:
    """Threads and files are no more, and device memory no more than `SLACK_BYTES` more, after
    `ROUNDS` rounds of a new group, a call, and the group's end."""
    history: list[dict[str, int]] = []
    for number in range(ROUNDS + 2):
        group = dist.new_group(list(range(world)), timedelta(seconds=30))
        assert group is not None
        _call(group, transport)
        torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        if number in (1, ROUNDS + 1):
            end = time.monotonic() + 5
            while True:
                torch.cuda.empty_cache()
                now = _held()
                less = {k: now[k] - history[0][k] for k in now} if history else {}
                late = time.monotonic() > end
                if late or (less and all(n <= 0 for n in less.values())):
                    break
                time.sleep(0.1)
            history.append(now)
    print(f"rank {rank}, {transport}: {history}", flush=True)
    first, last = history
    for name, value in last.items():
        slack = SLACK_BYTES if name == "device bytes" else 0
        assert value <= first[name] + slack, (rank, transport, name, history)


def _nccl(rank: int, world: int) -> None:
    _rounds(rank, world, "nccl")


def _symmetric(rank: int, world: int) -> None:
    _rounds(rank, world, "symmetric")


def _unsplit(rank: int, world: int) -> None:
    """The default group is bound to a device, and has its communicator. Rank 0 connects a group of
    its own while rank 1 waits for it: a split of the default group would wait for rank 1."""
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    default = dist.group.WORLD
    assert default is not None
    assert default.bound_device_id is not None
    backend = default._get_backend(torch.device("cuda"))
    before = backend.comm_split_count()  # type: ignore[attr-defined]
    store = c10d._get_default_store()
    if rank == 0:
        start = time.monotonic()
        alone = new_group([0], 0, "nccl", store, "alone", timedelta(seconds=20))
        alone.allreduce([x], dist.ReduceOp.MAX).wait()
        assert x.item() == world
        print(f"alone after {time.monotonic() - start:.2f} s", flush=True)
        end_group(alone, lost=False)
        store.set("connected", "")
    else:
        store.wait(["connected"], timedelta(seconds=20))
    assert ringfa3.connect(transport="nccl") == "nccl"
    _call(default, "nccl")
    torch.cuda.synchronize()
    splits = backend.comm_split_count() - before  # type: ignore[attr-defined]
    print(f"rank {rank}: {splits} splits of the default group", flush=True)
    assert splits == 0


def _early(rank: int, world: int) -> None:
    """After `connect`, a first call makes no group and no memory: it takes less than a second, with
    kernels that another group's call has loaded."""
    _call(dist.new_group(list(range(world))), "symmetric")  # type: ignore[arg-type]
    assert ringfa3.connect(transport="symmetric") == "symmetric"
    torch.cuda.synchronize()
    start = time.monotonic()
    _call(dist.group.WORLD, "symmetric")  # type: ignore[arg-type]
    torch.cuda.synchronize()
    took = time.monotonic() - start
    print(f"rank {rank}: first call after connect {took:.3f} s", flush=True)
    assert took < 1.0


@worlds(2, soak=(4,))
@pytest.mark.parametrize("function", [_nccl, _symmetric])
def test_rounds(function: Worker, world: int) -> None:
    spawn(function, world, 30.0)


@worlds(2, 4)
def test_a_group_alone(world: int) -> None:
    spawn(_unsplit, world, 30.0, bound=True)


@worlds(2, 4)
def test_early_connections(world: int) -> None:
    spawn(_early, world, 30.0)
