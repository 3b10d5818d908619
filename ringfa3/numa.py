"""The host: its identity, and the NUMA node of a GPU with its CPU cores, as Linux lists them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch

SYSTEM = Path("/sys")
MIN_CORES = 4  # of a node, for a rank and its threads


def host_name() -> str:
    """The same in all processes of a host; containers of one host have host names of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def bind_to_numa_node(device: torch.device) -> int | None:
    """Binds this thread to the cores of its GPU's NUMA node, and returns the node.

    Threads that this thread starts afterwards inherit the cores; others keep theirs.
    None, and nothing changes, if the node is unknown or the process may use too few of its cores.
    """
    node = numa_node_of(pci_address(device)) if device.type == "cuda" else None
    near = cores_of_node(node) if node is not None else set()
    if len(near) < MIN_CORES:
        return None
    os.sched_setaffinity(0, near)
    return node


def pci_address(device: torch.device) -> str:
    """A GPU's PCI address, as Linux writes it."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def numa_node_of(address: str) -> int | None:
    """The NUMA node of the device at a PCI address; None if unknown."""
    try:
        node = int((SYSTEM / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1 on a host without nodes


def cores_of_node(node: int) -> set[int]:
    """The cores of a NUMA node that this process may use; empty if unknown."""
    try:
        listed = (SYSTEM / f"devices/system/node/node{node}/cpulist").read_text()
        return parse_cores(listed) & os.sched_getaffinity(0)
    except (OSError, ValueError):
        return set()


def parse_cores(listed: str) -> set[int]:
    """The numbers in a list as Linux writes it: ``0-3,8,10-11``."""
    cores: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
