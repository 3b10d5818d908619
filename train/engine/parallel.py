"""Ranks and process groups: dp x cp, agreement between ranks, shutdown.

``cp`` consecutive ranks form a CP group and share one sample. There are ``dp`` such groups. A
single process creates no process group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ringfa3.agreement.rendezvous import rendezvous
from ringfa3.numa import host_name
from ringfa3.validation import TRANSPORTS_OF
from train.config import Config, ConfigError, ParallelConfig
from train.model.precision import compute_dtype

VISIBLE_S = 10.0  # how long a new file may take to appear on every host that shares its folder


@dataclass(frozen=True)
class ParallelLayout:
    """Rank, device and groups of this process. Groups and store are None exactly if ``world`` is 1.

    ``host_group`` connects all ranks over gloo, for communication outside the training step.
    ``save_group`` does the same for the thread that writes checkpoints. ``store`` belongs to this
    attempt of the job: keys of earlier attempts are not visible. Only rank 0 knows the last two:
    ``restarted`` is whether torchrun restarted the job; ``job`` identifies the job in all its
    attempts and is "" if its processes cannot find out.
    """

    rank: int
    world: int
    cp: int
    device: torch.device
    cp_group: dist.ProcessGroup | None = None
    host_group: dist.ProcessGroup | None = None
    save_group: dist.ProcessGroup | None = None
    store: dist.Store | None = None
    restarted: bool = False
    job: str = ""

    @property
    def cp_rank(self) -> int:
        """Rank within the CP group."""
        return self.rank % self.cp

    @property
    def dp_rank(self) -> int:
        """Index of the CP group."""
        return self.rank // self.cp

    @property
    def dp(self) -> int:
        """Number of CP groups."""
        return self.world // self.cp


def choose_device(config: Config) -> torch.device:
    """This process's device, by ``parallel.device``.

    Raises ``ConfigError`` if the host has too few GPUs, or if the precision, the residual stream or
    the transport does not work on that device.
    """
    choice, local_rank = config.parallel.device, int(os.environ.get("LOCAL_RANK", "0"))
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if choice == "cuda" and gpus < processes:
        raise ConfigError(
            f"parallel.device=cuda: this host has {gpus} GPUs for {processes} processes; nearest "
            f"valid: parallel.device=cpu (or {_launch(max(gpus, 1))})"
        )
    if choice == "auto" and 0 < gpus < processes:
        raise ConfigError(
            f"parallel.device=auto: this host has {gpus} GPUs for {processes} processes; start "
            f"{_launch(gpus)}, or choose parallel.device=cpu"
        )
    cuda = choice == "cuda" or (choice == "auto" and gpus >= processes)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda and config.train.precision == "float32":
        raise ConfigError(
            "train.precision=float32: attention on the GPU computes in 16 bits; nearest valid: "
            "train.precision=bfloat16 (or parallel.device=cpu)"
        )
    dtype = compute_dtype(config.train.precision, device)
    if dtype == torch.float32 and config.train.residual != "float32":
        raise ConfigError(
            f"train.residual={config.train.residual} is narrower than the float32 that matrix "
            "products take; nearest valid: train.residual=float32 (or train.precision=bfloat16)"
        )
    allowed = TRANSPORTS_OF[device.type]
    if config.parallel.transport not in ("auto", *allowed):
        raise ConfigError(
            f"parallel.transport={config.parallel.transport} cannot move {device.type} tensors; "
            f"nearest valid: parallel.transport={allowed[0]}"
        )
    return device


def _launch(gpus: int) -> str:
    """The launcher's options for one process on each of ``gpus`` GPUs of a host."""
    if "SLURM_PROCID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        shared = " (--gpus-per-task shows a task one GPU alone)" if gpus == 1 else ""
        return f"srun with --ntasks-per-node and --gpus-per-node equal{shared}"
    return f"torchrun --nproc-per-node {gpus}"


def join(config: ParallelConfig, device: torch.device) -> ParallelLayout:
    """Create the process groups of this rank, from the environment variables of torchrun.

    The backend is NCCL with one CUDA device per process, gloo on the CPU. A collective fails if a
    peer does not join it within ``timeout_s``.
    """
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if world == 1:
        alone = ParallelLayout(rank, world, config.cp, device, restarted=restarted)
        return replace(alone, job=_launcher())
    timeout = timedelta(seconds=config.timeout_s)
    shared, job = _connect(rank, timeout), ""
    if rank == 0:  # this host may be at its first attempt after another host has restarted
        restarted = shared.add("attempts", 1) > 1 or restarted
        if _agent_hosts_store():  # the store outlives this attempt, whichever host rank 0 is on
            job = shared.compare_set("job", "", uuid.uuid4().hex).decode()
    store = rendezvous(shared, rank, world, config.timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # No device_id: with one, every later NCCL group is a split of the default communicator, which
    # all ranks must join together. The ring creates groups of a few ranks when it needs them.
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    cp_groups = [list(range(first, first + config.cp)) for first in range(0, world, config.cp)]
    own_group, _ = dist.new_subgroups_by_enumeration(cp_groups, timeout=timeout)
    host_group, save_group = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    return ParallelLayout(
        *(rank, world, config.cp, device, own_group, host_group, save_group, store, restarted, job)
    )


def _agent_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _launcher() -> str:
    """Host, id and start time of the parent process, torchrun's agent; "" if it is not visible."""
    try:
        status = Path(f"/proc/{os.getppid()}/stat").read_text()
    except OSError:  # the parent lives outside of the container, or belongs to another user
        return ""
    # The name, in parentheses, may contain spaces. The 20th field after it is the start time.
    return f"{host_name()} {os.getppid()} {status.rpartition(')')[2].split()[19]}"


def _connect(rank: int, timeout: timedelta) -> dist.TCPStore:
    """The store at torchrun's address, hosted by its agent or, if the agent does not, by rank 0."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not _agent_hosts_store(),
        timeout=timeout,
        wait_for_workers=False,
    )


def require_group(parallel: ParallelLayout) -> None:
    """Create a default process group of one rank, for an engine that needs one."""
    if parallel.world == 1 and not dist.is_initialized():
        backend = "nccl" if parallel.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def require_agreement(parallel: ParallelLayout, settings: dict[str, str]) -> None:
    """Raise ``RuntimeError`` on every rank if a setting differs between ranks. It names one."""
    if parallel.world == 1:
        return
    everyone: list[dict[str, str]] = [{} for _ in range(parallel.world)]
    dist.all_gather_object(everyone, settings)
    for name, value in everyone[0].items():
        other = next(
            (rank for rank in range(parallel.world) if everyone[rank][name] != value), None
        )
        if other is not None:
            raise RuntimeError(
                f"{name} of rank {other} differs from that of rank 0: {everyone[other][name]} "
                f"against {value}; start every host with the same command and the same files"
            )


def from_rank_0(parallel: ParallelLayout, make: Callable[[], Any]) -> Any:
    """Run ``make`` on rank 0 and return its value, or raise its error, on all ranks."""
    answer: list[Any] = [None, None]
    if parallel.rank == 0:
        try:
            answer[0] = make()
        except Exception as error:  # raised below, here and elsewhere
            answer[1] = error
    if parallel.world > 1:
        dist.broadcast_object_list(answer, src=0, group=parallel.host_group)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def require_shared(parallel: ParallelLayout, folder: Path) -> None:
    """Raise ``ConfigError`` on every rank unless all find a file that rank 0 writes there."""
    if parallel.world == 1:
        return

    def write() -> Path:
        path = folder / f".shared-{uuid.uuid4().hex}"
        path.touch()
        return path

    path: Path = from_rank_0(parallel, write)
    deadline = time.monotonic() + VISIBLE_S
    while not (visible := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    everyone: list[Any] = [None] * parallel.world
    own = None if visible else f"rank {parallel.rank} on {socket.gethostname()}"
    dist.all_gather_object(everyone, own, group=parallel.host_group)
    if parallel.rank == 0:
        path.unlink()
    blind = [name for name in everyone if name is not None]
    if blind:
        raise ConfigError(
            f"run.dir: {blind[0]} does not see what rank 0 writes to {folder}; checkpoints need a "
            f"folder on a file system that all hosts share"
        )


def sum_over_ranks(parallel: ParallelLayout, values: Tensor) -> Tensor:
    """``values`` on this rank's device, summed over all ranks. The host does not wait for it."""
    if parallel.device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()  # a copy from other memory waits for the device
    values = values.to(parallel.device, non_blocking=True)
    if parallel.world > 1:
        dist.all_reduce(values)
    return values


def shutdown(
    parallel: ParallelLayout | None,
    code: int,
    closers: Iterable[Callable[[], None]] = (),
    groups: Iterable[dist.ProcessGroup] = (),
) -> NoReturn:
    """Close writers, destroy the process groups and end the process with ``code``.

    ``groups`` are further groups, which ``parallel`` does not name. A rank that exits at once may
    close its sockets while a peer still uses them. With ``code`` 0 all ranks therefore pass a
    barrier on every group first. After a failure a peer may be gone, so no rank waits. ``os._exit``
    skips the destructors of communication threads, which can abort a finished process.
    """
    for close in closers:
        with contextlib.suppress(Exception if code else ()):  # the failure is already reported
            close()
    if code == 0 and parallel is not None and parallel.world > 1:
        own = (parallel.cp_group, parallel.save_group, parallel.host_group, None)
        for group in (*groups, *own):
            _barrier(group, parallel.device)
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _barrier(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """A barrier. With NCCL it needs the device: PyTorch warns if it has to guess it."""
    nccl = dist.get_backend(group) == dist.Backend.NCCL
    dist.barrier(group, device_ids=[device.index] if nccl else None)
