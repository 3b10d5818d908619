"""If this fails, a finished job ends with an error. A process that has run a ring ends with exit
code 0 and prints nothing on stderr.

Python unwinds a thread that is in C++ when Python ends, and the process aborts. So our threads end
earlier. The store monitor is always in C++ here.
"""

from __future__ import annotations

import os

import pytest

from tests.support.fake_tools import start
from tests.support.ranks import free_port

WORKER = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
import ringfa3.ring.store_monitor
from ringfa3 import plan_context, ring_attn_func

ringfa3.ring.store_monitor.PERIOD_S = 0
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
plan = plan_context(96)
x = torch.ones(plan.local_tokens, 2, 8, requires_grad=True)
ring_attn_func(x, x, x, plan).sum().backward()
dist.barrier()
if {destroys}:
    dist.destroy_process_group()
else:
    store = dist.distributed_c10d._get_default_store()
    store.add("over", 1)
    while dist.get_rank() == 0 and store.add("over", 0) < 2:  # the store's host leaves last
        pass
"""


@pytest.mark.parametrize("destroys", [True, False])
def test_a_process_ends_in_order(destroys: bool) -> None:
    """Whether or not the user destroys the process group."""
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own["OMP_NUM_THREADS"] = "1"
    code = WORKER.format(destroys=destroys)
    ranks = [start(code, env={**os.environ, **own, "RANK": str(rank)}) for rank in range(2)]
    ends = [(*rank.communicate(timeout=300), rank.returncode) for rank in ranks]
    assert ends == [("", "", 0)] * 2
