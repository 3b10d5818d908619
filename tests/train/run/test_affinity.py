"""If this fails, processes of a host share cores, and training is slow. Threads and cores."""

from __future__ import annotations

import os

import pytest
import torch

from ringfa3 import numa
from ringfa3.numa import parse_cores
from train.config import ParallelConfig
from train.run import affinity
from train.run.affinity import threads


def test_lists_of_cores_as_the_kernel_writes_them():
    assert parse_cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_cores("\n") == set()


@pytest.mark.parametrize(
    ("wished", "processes", "setting", "expected"),
    [
        ("1", 4, None, 4),  # torchrun's default of 1
        ("", 4, None, 4),
        ("6", 4, None, 6),
        ("6", 4, 3, 3),
        ("1", 99, None, 1),
    ],
)
def test_threads_share_the_cores(monkeypatch, wished, processes, setting, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", wished)
    assert threads(ParallelConfig(threads=setting), 16, processes) == expected


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A fake ``/sys``: the node of each GPU and the cores of each node.

    The fixture makes it, and returns what the process has set: its cores and its threads.
    """
    done = {"cores": set(range(64))}

    def make(gpus: list[int], nodes: dict[int, str], processes: int) -> dict:
        for gpu, node in enumerate(gpus):
            folder = tmp_path / f"bus/pci/devices/0000:{gpu:02x}:00.0"
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(f"{node}\n")
        for node, its in nodes.items():
            folder = tmp_path / f"devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{its}\n")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        return done

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(numa, "SYSTEM", tmp_path)
    for module in (affinity, numa):
        monkeypatch.setattr(module, "pci_address", lambda gpu: f"0000:{gpu.index:02x}:00.0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: done["cores"])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: done.update(cores=cores))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: done.update(threads=n))
    return make


TWO_NODES = {0: "0-15,32-47", 1: "16-31,48-63"}


@pytest.mark.parametrize(
    ("gpus", "processes", "gpu", "near", "expected"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], 8, 5, TWO_NODES[1], 8),
        ([0, 0, 0, 1], 4, 0, TWO_NODES[0], 10),
        ([0, 0, 0, 1], 4, 3, TWO_NODES[1], 32),
        ([0, 0, 1, 1], 2, 1, TWO_NODES[0], 16),  # two of the GPUs are not used
        ([-1, -1], 2, 1, "0-63", 32),  # no nodes: all processes share all cores
    ],
)
def test_processes_of_one_node_share_its_cores(host, gpus, processes, gpu, near, expected):
    done = host(gpus, TWO_NODES, processes)
    affinity.set_affinity(ParallelConfig(), torch.device("cuda", gpu))
    assert done == {"cores": parse_cores(near), "threads": expected}


def test_without_numa_all_processes_share_the_host(host):
    done = host([0, 1], TWO_NODES, 2)
    affinity.set_affinity(ParallelConfig(numa=False), torch.device("cuda", 0))
    assert done == {"cores": set(range(64)), "threads": 32}


def test_a_process_with_hardly_any_core_there_stays(host):
    done = host([0, 1], {0: "0-2", 1: "3-63"}, 2)
    affinity.set_affinity(ParallelConfig(), torch.device("cuda", 0))
    assert done == {"cores": set(range(64)), "threads": 32}
