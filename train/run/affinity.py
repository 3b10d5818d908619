"""Which cores a process runs on, and with how many threads."""

from __future__ import annotations

import os

import torch

from ringfa3.numa import move_near, node_of, pci_address
from train.config import ParallelConfig


def settle(parallel: ParallelConfig, device: torch.device) -> None:
    """Move this process to the cores next to its GPU, and share them in threads with the others.

    Local process n is on GPU n: those whose GPU hangs on the same node run on the same cores.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node = move_near(device) if parallel.numa else None
    if node is not None:
        addresses = [pci_address(torch.device("cuda", gpu)) for gpu in range(processes)]
        processes = sum(node_of(address) == node for address in addresses)
    torch.set_num_threads(threads(parallel, len(os.sched_getaffinity(0)), processes))


def threads(parallel: ParallelConfig, cores: int, processes: int) -> int:
    """Threads of one of the ``processes`` that run on the same ``cores``.

    torchrun sets OMP_NUM_THREADS=1 where the user has not set it, so only more than that counts as
    the user's wish.
    """
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if parallel.threads is not None:
        return parallel.threads
    if wished.isdigit() and int(wished) > 1:
        return int(wished)
    return max(1, cores // processes)
