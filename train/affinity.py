"""Which cores a process runs on, and with how many threads."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from train.config import ParallelConfig

SYSTEM = Path("/sys")


def settle(parallel: ParallelConfig, device: torch.device) -> None:
    """Move this process to the cores next to its GPU, and share them in threads with the others.

    Local process n is on GPU n: those whose GPU hangs on the same node run on the same cores.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if parallel.numa and device.type == "cuda":
        node = node_of(pci_address(device))
        if node is not None and (near := cores_of(node)):
            os.sched_setaffinity(0, near)
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


def pci_address(device: torch.device) -> str:
    """A GPU's place on the bus, as the kernel writes it."""
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def node_of(address: str) -> int | None:
    """The NUMA node of the device at a PCI address; None where nobody knows."""
    try:
        node = int((SYSTEM / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # the kernel says -1 on a host without nodes


def cores_of(node: int) -> set[int]:
    """The cores of a NUMA node that this process may use; empty where nobody knows."""
    try:
        listed = (SYSTEM / f"devices/system/node/node{node}/cpulist").read_text()
        return parse_cores(listed) & os.sched_getaffinity(0)
    except (OSError, ValueError):
        return set()


def parse_cores(listed: str) -> set[int]:
    """The numbers in a list as the kernel writes it: ``0-3,8,10-11``."""
    cores: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
