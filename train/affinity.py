"""Which cores a process runs on, and with how many threads."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from train.config import ParallelConfig


def settle(parallel: ParallelConfig, device: torch.device) -> None:
    """Move this process to the cores next to its GPU, and share the host's cores in threads."""
    if parallel.numa and device.type == "cuda" and (near := cores_near(device)):
        os.sched_setaffinity(0, near)
    torch.set_num_threads(threads(parallel, len(os.sched_getaffinity(0))))


def threads(parallel: ParallelConfig, cores: int) -> int:
    """Threads of one process that may run on ``cores``, which its host's other processes share.

    torchrun sets OMP_NUM_THREADS=1 where the user has not set it, so only more than that counts as
    the user's wish.
    """
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if parallel.threads is not None:
        return parallel.threads
    if wished.isdigit() and int(wished) > 1:
        return int(wished)
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cores_near(device: torch.device, system: Path = Path("/sys")) -> set[int]:
    """The cores of the GPU's NUMA node that this process may use; empty where nobody knows."""
    gpu = torch.cuda.get_device_properties(device)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return set()
    return parse_cores(listed) & os.sched_getaffinity(0)


def parse_cores(listed: str) -> set[int]:
    """The numbers in a list as the kernel writes it: ``0-3,8,10-11``."""
    cores: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
