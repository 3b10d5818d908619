"""Processes that talk over gloo: a pool for many short tests, and throw-away ones to kill."""

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
from ringfa3.planning import context_plan
from ringfa3.ring.group import RingGroup

TIMEOUT_S = 20.0  # of the pool's process groups
LIMIT_S = 25.0  # for one call of `run`

# Forked from a server that has imported torch, and has run nothing: a rank starts in no time.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ringfa3", "pytest", "hypothesis"])


class RankError(AssertionError):
    """A function raised on some ranks, or a rank died or hung: with the tracebacks."""


def group_of(world: int, timeout: float = 4.0) -> dist.ProcessGroup:
    """On all ranks of the pool: a fresh group of the first `world`, which may be lost."""
    group = dist.new_group(list(range(world)), timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup) or dist.get_rank() >= world
    return group


def _enter(rank: int, world: int, port: int, timeout: float, hosts: bool) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, None, hosts and rank == 0, limit, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _warm_up() -> None:
    """One call on this process alone: PyTorch imports much at its first, which takes seconds."""
    x = torch.randn(1, 4, 1, 8, requires_grad=True)
    flash_attn_func(x, x, x).sum().backward()  # type: ignore[union-attr]


def _attempt(function: Callable[..., Any], *args: Any) -> bytes:
    """The pickled (True, result) or (False, traceback)."""
    try:
        return pickle.dumps((True, function(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    """A pool's process: runs what it is sent until it is sent nothing."""
    try:
        _warm_up()
        _enter(rank, world, port, TIMEOUT_S, hosts=False)
        groups = {n: dist.new_group(list(range(n))) for n in range(1, world)}
        groups[world] = dist.group.WORLD
        kept = [group.group_name for n, group in groups.items() if rank < n]
        gc.freeze()  # what is here stays
        while job := pipe.recv_bytes():
            faulthandler.dump_traceback_later(LIMIT_S - 5)
            size, function, args = pickle.loads(job)
            pipe.send_bytes(_attempt(function, groups[size], *args))
            _end_groups(kept)
            faulthandler.cancel_dump_traceback_later()
    except EOFError:  # the suite is over
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # an orderly end could wait for a lost peer


def _end_groups(kept: list[str]) -> None:
    """Ends all process groups but those of these names, and what RingFA3 has made for them.

    A group over gloo has threads that wake up a hundred times a second, for as long as it lives.
    """
    for group in list(c10d._world.pg_map):
        if group.group_name.partition("/ringfa3/")[0] not in kept:
            dist.destroy_process_group(group)
    RingGroup.close_ended()
    context_plan._cached_plan.cache_clear()
    gc.collect()


def _once(
    rank: int, world: int, port: int, timeout: float, hosts: bool, pipe: Connection, job: bytes
) -> None:
    """A throw-away process: runs one function and stays, so that its peers see no end of it."""
    try:
        _warm_up()
        pipe.send_bytes(b"")  # ready; short timeouts count from when all are
        pipe.recv_bytes()
        _enter(rank, world, port, timeout, hosts)
        function, args = pickle.loads(job)
        faulthandler.dump_traceback_later(15)
        pipe.send_bytes(_attempt(function, dist.group.WORLD, *args))
        faulthandler.cancel_dump_traceback_later()
        pipe.recv_bytes()
    finally:
        os._exit(0)


class Ranks:
    """Processes 0 to size - 1, started at the first use, and again after one was lost."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._store: dist.TCPStore | None = None

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(group, *args) on ranks 0 to world - 1; their results.

        Raises:
            RankError: it raised on a rank, or a rank died or did not answer in time.
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
                    raise RankError(f"rank {rank} ended after the job before") from None
            deadline = time.monotonic() + LIMIT_S
            for rank, pipe in enumerate(self._pipes[:world]):
                answers.append(_answer(rank, pipe, deadline))
        finally:
            if len(answers) < world or not all(ok for ok, _ in answers):
                self.close()  # its groups are in no known state
        wrong = [f"rank {r}:\n{said}" for r, (ok, said) in enumerate(answers) if not ok]
        if wrong:
            raise RankError("\n".join(wrong))
        return [result for _, result in answers]

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes, self._store = [], [], None

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, self.size, self._store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


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
    """Calls function(group, *args) on processes of their own; None for ranks that give no result.

    timeout: of the process group. lost: a rank that is not waited for. hosts: rank 0 hosts the
    store, as it does without torchrun. Returns once every other rank has answered or died, or
    after `limit`; all are killed then.
    """
    store = None if hosts else dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = free_port() if store is None else store.port
    job = pickle.dumps((function, args))
    pipes, processes = [], []
    try:
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_once, args=(rank, world, port, timeout, hosts, theirs, job), daemon=True
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
    wrong = []
    deadline = time.monotonic() + limit
    while set(open_pipes) - {lost} and time.monotonic() < deadline:
        for rank, pipe in list(open_pipes.items()):
            if not pipe.poll(0.02):
                continue
            del open_pipes[rank]
            try:
                ok, said = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                continue
            results[rank] = said if ok else None
            if not ok:
                wrong.append(f"rank {rank}:\n{said}")
    if wrong:
        raise RankError("\n".join(wrong))
    return results


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
