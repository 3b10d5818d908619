"""The CPU cores next to a GPU, as Linux shows them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SYSTEM = Path("/sys")
FEWEST = 4  # cores of a node, on which ranks and their threads find room


def move_near(device: torch.device) -> int | None:
    """Keeps this process on the cores of its GPU's NUMA node, which it gives.

    None where nobody knows them, or it may use hardly any: then it stays where it may run.
    """
    node = node_of(pci_address(device)) if device.type == "cuda" else None
    near = cores_of(node) if node is not None else set()
    if len(near) < FEWEST:
        return None
    os.sched_setaffinity(0, near)
    return node


def pci_address(device: torch.device) -> str:
    """A GPU's place on the bus, as the kernel writes it."""
    gpu: Any = torch.cuda.get_device_properties(device)
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
