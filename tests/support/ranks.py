"""Ranks on gloo: a pool of processes for many short tests, and disposable ones for fault tests."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ringfa3 import flash_attn_func

TIMEOUT_S = 20.0  # of the pool's process groups
LIMIT_S = 25.0  # for one call of `run`

# Processes are forked from a server that has imported these and has no threads. What compilers
# import takes seconds.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *("ringfa3", "torch._dynamo.testing", "pytest", "hypothesis"),
        *("hydra.main", "matplotlib.figure", "torch.distributed.run"),
        *(f"train.tasks.{name}" for name in ("generate", "train", "verify")),
        "train.probes.text_loss",
    ]
)


class RankError(AssertionError):
    """A function raised on some ranks, or a rank died or hung; the message has the tracebacks."""


def group_of(world: int, timeout: float = 4.0) -> dist.ProcessGroup:
    """A new group of the first `world` ranks, for tests that break their group.

    All ranks of the pool must call it.
    """
    group = dist.new_group(list(range(world)), timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup) or dist.get_rank() >= world
    return group


def _init_process_group(rank: int, world: int, port: int, timeout: float, hosts: bool) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, None, hosts and rank == 0, limit, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _warm_up() -> None:
    """A call on this process alone, so that no time limit includes what happens only once."""
    x = torch.randn(1, 4, 1, 8, requires_grad=True)
    flash_attn_func(x, x, x).sum().backward()  # type: ignore[union-attr]


def _call(function: Callable[..., Any], *args: Any) -> bytes:
    """The pickled (True, result) or (False, traceback)."""
    try:
        return pickle.dumps((True, function(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    """The main function of a pool's process: runs jobs until it receives an empty one."""
    try:
        _warm_up()
        _init_process_group(rank, world, port, TIMEOUT_S, hosts=False)
        groups = {n: dist.new_group(list(range(n))) for n in range(1, world)}
        groups[world] = dist.group.WORLD
        permanent = [group.group_name for n, group in groups.items() if rank < n]
        gc.freeze()  # the collector need not look at the imported modules
        pipe.send_bytes(b"")  # ready: no time limit includes the start
        while job := pipe.recv_bytes():
            faulthandler.dump_traceback_later(LIMIT_S - 5)
            size, function, args = pickle.loads(job)
            before = c10d._world.group_count
            answer = _call(function, groups[size], *args)
            if size < world and c10d._world.group_count != before:
                # New groups of later jobs would have other numbers, and names, on other ranks.
                text = f"a job of {size} of {world} ranks made a process group; run it on all"
                answer = pickle.dumps((False, text))
            pipe.send_bytes(answer)
            _destroy_groups(permanent)
            torch.set_num_threads(1)  # a task of the trainer sets its own number
            faulthandler.cancel_dump_traceback_later()
    except EOFError:  # the suite has ended
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # a normal exit could wait for a lost peer


def _destroy_groups(permanent: list[str]) -> None:
    """Destroys all process groups except the permanent ones, as a user would.

    A gloo group has threads that wake up a hundred times a second until it is destroyed.
    """
    for group in list(c10d._world.pg_map):
        if group.group_name not in permanent:
            dist.destroy_process_group(group)
    gc.collect()


def _once(
    rank: int,
    world: int,
    port: int,
    timeout: float,
    hosts: bool,
    limit: float,
    pipe: Connection,
    job: bytes,
) -> None:
    """The main function of a disposable process: runs one job, then stays alive.

    Its peers therefore see no closed connection. Its stack is printed only when it is about to be
    killed: to print it can crash a process that runs.
    """
    try:
        _warm_up()
        pipe.send_bytes(b"")  # ready; the short timeouts begin when all ranks are
        pipe.recv_bytes()
        _init_process_group(rank, world, port, timeout, hosts)
        function, args = pickle.loads(job)
        faulthandler.dump_traceback_later(max(limit - 5, 1))
        pipe.send_bytes(_call(function, dist.group.WORLD, *args))
        faulthandler.cancel_dump_traceback_later()
        pipe.recv_bytes()
    finally:
        os._exit(0)


class Ranks:
    """A pool of `size` ranks. They start at the first use, and again after a failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._store: dist.TCPStore | None = None

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(group, *args) on ranks 0 to world - 1. Returns their results.

        Raises:
            RankError: the function raised on a rank, or a rank died or did not answer in time.
        """
        if not self._processes:
            self._start()
        job = pickle.dumps((world, function, args))
        answers: list[tuple[bool, Any]] = []
        try:
            for rank, pipe in enumerate(self._pipes[:world]):
                try:
                    pipe.send_bytes(job)
                except OSError:
                    raise RankError(f"rank {rank} ended after the previous job") from None
            deadline = time.monotonic() + LIMIT_S
            for rank, pipe in enumerate(self._pipes[:world]):
                answers.append(_answer(rank, pipe, deadline))
        finally:
            if len(answers) < world or not all(ok for ok, _ in answers):
                self.close()  # the state of its groups is unknown
        errors = [f"rank {r}:\n{answer}" for r, (ok, answer) in enumerate(answers) if not ok]
        if errors:
            raise RankError("\n".join(errors))
        return [result for _, result in answers]

    def close(self) -> None:
        """Kills all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes, self._store = [], [], None

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(
                target=_serve, args=(rank, self.size, self._store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv_bytes()


def _answer(rank: int, pipe: Connection, deadline: float) -> tuple[bool, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return False, "no answer in time; its stack is on stderr"
    try:
        answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        return False, "the process died"
    return answer


def sacrifice(
    world: int,
    timeout: float,
    function: Callable[..., Any],
    *args: Any,
    lost: int = -1,
    hosts: bool = False,
    limit: float = 20.0,
) -> list[Any]:
    """Calls function(group, *args) on disposable processes. The result of a dead rank is None.

    Returns when all ranks except `lost` have answered or died, or after `limit` seconds, and kills
    all processes.

    Args:
        timeout: seconds, of the process group.
        lost: a rank that the caller expects to hang.
        hosts: rank 0 hosts the store, as without torchrun.
    """
    store = None if hosts else dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = free_port() if store is None else store.port
    job = pickle.dumps((function, args))
    pipes, processes = [], []
    try:
        for rank in range(world):
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(
                target=_once,
                args=(rank, world, port, timeout, hosts, limit, theirs, job),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv_bytes()
        for pipe in pipes:
            pipe.send_bytes(b"")
        return _results(pipes, lost, limit)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(pipes: list[Connection], lost: int, limit: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    open_pipes = dict(enumerate(pipes))
    errors = []
    deadline = time.monotonic() + limit
    while set(open_pipes) - {lost} and time.monotonic() < deadline:
        for rank, pipe in list(open_pipes.items()):
            if not pipe.poll(0.02):
                continue
            del open_pipes[rank]
            try:
                ok, answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                continue
            results[rank] = answer if ok else None
            if not ok:
                errors.append(f"rank {rank}:\n{answer}")
    if errors:
        raise RankError("\n".join(errors))
    return results


def free_port() -> int:
    """A free TCP port of this host."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
