"""Rings over NCCL whose K/V cross between hosts once for each host that needs them.

`torchrun ... -m tests.support.two_levels` is a rank of a job of two hosts.
"""

from __future__ import annotations

import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist

from ringfa3.ring.levels.flow_messages import KV, RETURN
from ringfa3.ring.p2p import NcclTransport
from tests.gpu.test_gpu_symmetric import Layer
from tests.ring.test_p2p_pass import Sent

STEPS = 8


def check_two_levels(world: int, hosts: int, transport: str = "nccl") -> None:
    """Random layers hold the single-device gate, see `Layer.check`. The bytes between hosts are
    exactly those of the plan: K/V of both passes, and dK/dV in float32 of the backward. Over
    `symmetric` NCCL sends nothing inside a host."""
    rng, crossed = random.Random(world), 0
    for step in range(STEPS):
        layer = Layer(rng, lengths=None if step else [700, 1, 1800])
        layer.transport = transport
        host = layer.plan.hosts
        assert host == tuple(rank * hosts // world for rank in range(world))
        with Sent(NcclTransport) as sent:
            layer.forward()
            layer.backward()
        layer.check()
        found = torch.zeros(2, hosts, hosts, dtype=torch.int64, device="cuda")
        for (tag, peer), count in sent.bytes.items():
            found[(KV, RETURN).index(tag), host[layer.plan.rank], host[peer]] += count
        dist.all_reduce(found)
        rows = torch.from_numpy(layer.plan.by_messages().between_hosts)
        numbers = layer.k[0].numel() * rows
        both_passes = 2 * 2 * layer.k.element_size()
        expected = torch.stack((both_passes * numbers, 2 * 4 * numbers.t()))
        if transport == "nccl":
            expected.diagonal(dim1=1, dim2=2).copy_(found.cpu().diagonal(dim1=1, dim2=2))
        assert torch.equal(found.cpu(), expected), f"step {step}: {found}, expected {expected}"
        crossed += int(rows.sum())
    assert crossed > 0


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    check_two_levels(dist.get_world_size(), hosts=2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
