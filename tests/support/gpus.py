"""Tests of several GPUs: how many, and a process of a group for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.ranks import free_port

Worker = Callable[[int, int], None]  # of a rank and the number of ranks


def worlds(*sizes: int, soak: Sequence[int] = ()) -> pytest.MarkDecorator:
    """Parametrises `world`, the number of GPUs; from 3 on a test is marked `many_gpus`.

    soak: further sizes, of soak tests.
    """
    cases = []
    for size in sorted({*sizes, *soak}):
        marks = [pytest.mark.many_gpus] if size > 2 else []
        marks += [pytest.mark.soak] if size in soak else []
        cases.append(pytest.param(size, marks=marks))
    return pytest.mark.parametrize("world", cases)


def require_gpus(world: int) -> None:
    if (here := torch.cuda.device_count()) < world:
        pytest.skip(f"{world} GPUs are needed, {here} are here")


def as_host(number: int, gpus: Iterable[int]) -> dict[str, str]:
    """The environment of processes that NCCL takes for a host of its own, reached by sockets.

    gpus: of this machine, for these processes.
    """
    sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    devices = ",".join(map(str, gpus))
    return {**sockets, "NCCL_HOSTID": f"host{number}", "CUDA_VISIBLE_DEVICES": devices}


def join(rank: int, world: int, port: int, timeout_s: float = 60.0, bound: bool = False) -> None:
    """Makes NCCL's default group of `world` processes of this host, each on the GPU of its rank.

    bound: the group has its communicator from the start.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", rank) if bound else None,
    )


def spawn(worker: Worker, world: int, timeout_s: float = 60.0, bound: bool = False) -> None:
    """Runs `worker` in a process for each rank of a group, which `join` makes."""
    require_gpus(world)
    mp.spawn(_enter, (world, free_port(), worker, timeout_s, bound), world)


def _enter(rank: int, world: int, port: int, worker: Worker, timeout_s: float, bound: bool) -> None:
    join(rank, world, port, timeout_s, bound)
    worker(rank, world)
    dist.barrier()
    dist.destroy_process_group()
