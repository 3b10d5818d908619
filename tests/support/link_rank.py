"""A rank of a ring whose hosts are network namespaces: prints the bytes that its host's link sent.

python -m tests.support.link_rank RANK WORLD ADDRESS PORT INTERFACE
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ringfa3 import plan_context, ring_attn_func

TOKENS, HEADS, HEAD_DIM = 2048, 2, 128


def sent_bytes(interface: str) -> int:
    """Bytes that an interface of this network namespace has sent."""
    shown = subprocess.check_output(["ip", "-s", "-j", "link", "show", interface], text=True)
    count: int = json.loads(shown)[0]["stats64"]["tx"]["bytes"]
    return count


def main() -> None:
    rank, world, address, port, interface = sys.argv[1:]
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    store = dist.TCPStore(address, int(port), int(world), rank == "0", limit)
    group = {"rank": int(rank), "world_size": int(world)}
    dist.init_process_group("gloo", store=store, timeout=limit, **group)  # type: ignore[arg-type]
    found = {}
    for hosts in (1, 2):
        plan = plan_context(TOKENS, hosts=hosts)
        leaves = [torch.randn(plan.local_tokens, HEADS, HEAD_DIM).requires_grad_() for _ in "qkv"]
        for _ in range(2):  # the first call connects and agrees
            dist.barrier()
            before = sent_bytes(interface)
            dist.barrier()
            out = ring_attn_func(*leaves, plan)
            assert isinstance(out, torch.Tensor)
            out.sum().backward()
            dist.barrier()
            found[hosts] = sent_bytes(interface) - before
    print(json.dumps([found[1], found[2]]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
