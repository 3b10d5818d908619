"""CPU affinity and the number of CPU threads of a process."""

from __future__ import annotations

import os

import torch

from ringfa3.numa import bind_to_numa_node, numa_node_of, pci_address
from train.config import ParallelConfig


def set_affinity(config: ParallelConfig, device: torch.device) -> None:
    """Bind this process to the cores of its GPU's NUMA node, and set its number of threads.

    Local process n uses GPU n. Processes whose GPUs share a NUMA node share its cores.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    node = bind_to_numa_node(device) if config.numa else None
    if node is not None:
        addresses = [pci_address(torch.device("cuda", gpu)) for gpu in range(processes)]
        processes = sum(numa_node_of(address) == node for address in addresses)
    torch.set_num_threads(threads(config, len(os.sched_getaffinity(0)), processes))


def threads(config: ParallelConfig, cores: int, processes: int) -> int:
    """Threads for one of the ``processes`` that share ``cores``.

    torchrun sets OMP_NUM_THREADS=1 if the user has not set it. A value of 1 may therefore be
    torchrun's; a larger one is the user's.
    """
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if config.threads is not None:
        return config.threads
    if requested.isdigit() and int(requested) > 1:
        return int(requested)
    return max(1, cores // processes)
