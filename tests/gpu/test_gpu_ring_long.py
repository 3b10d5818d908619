"""If this fails, long training over a ring drifts, or a killed rank hangs the others. Long runs and
killed ranks: `pytest -m gpu tests/gpu/test_gpu_ring_long.py`."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from ringfa3 import host, plan_context, ring_attn_func
from ringfa3.custom_op import set_op_hook
from ringfa3.symmetric.backend import DriverCalls, SymmetricBackend
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, FORWARD_MODES
from tests.gpu.test_gpu_symmetric import Layer
from tests.support.gpus import join, require_gpus, spawn, worlds
from tests.support.ranks import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 500
WARM = 200  # steps after which caches are full
CHECK_EVERY = 10  # steps
# Bytes that may be held more at the end than after WARM steps: tensors, the device with the
# allocator's fragments, and the process's memory.
SLACK = (4 << 20, 48 << 20, 64 << 20)
TIMEOUT_S = 10.0
LOST = 1  # the rank that is killed


def _held() -> tuple[int, int, int]:
    """Bytes: in tensors; in use on the GPU with an empty cache; the process's maximum."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return torch.cuda.memory_allocated(), total - free, most


def _wander(transport: str, rank: int, world: int) -> None:
    """Random steps, the same on all ranks; no two are of one shape."""
    rng = random.Random(world)
    begin = time.monotonic()
    for step in range(STEPS):
        os.environ[FORWARD_MODE_ENV] = rng.choice(FORWARD_MODES)
        longest = rng.choice((30, 900, 3000))
        layer = Layer(rng, longest) if step else Layer(rng, lengths=[3000] * 6)
        layer.transport = transport
        layer.forward()
        layer.backward()
        if step % CHECK_EVERY == 0:
            layer.check()
        del layer
        if step == WARM:
            warm = _held()
    more = [now - then for now, then in zip(_held(), warm, strict=True)]
    if rank == 0:
        took = f"{STEPS} steps in {time.monotonic() - begin:.0f} s"
        print(f"{took}, then {[x >> 10 for x in more]} KiB more in tensors, GPU, process")
    assert all(x <= slack for x, slack in zip(more, SLACK, strict=True)), more


@worlds(soak=(2, 4, 8))
@pytest.mark.parametrize("transport", ["symmetric", "nccl"])
def test_random_steps_neither_hang_nor_leak(transport: str, world: int) -> None:
    """500 shapes, layouts and documents. In every tenth, out, dq, dk, dv pass the single-device
    gate, max|x - ref| <= 2 max|x_pt - ref| + 1e-5, ref in float64."""
    spawn(partial(_wander, transport), world)


def _train(rank: int, world: int, port: int, folder: str, executor: str) -> None:
    """Steps, in the third of which a rank is killed.

    The Python executor has issued some of the backward's steps then, the C++ executor none.
    """
    log = (Path(folder) / f"{rank}.log").open("w")
    os.dup2(log.fileno(), sys.stderr.fileno())
    join(rank, world, port, TIMEOUT_S)
    host.select(executor)
    plan = plan_context(8192 * world)
    x = torch.randn(plan.local_tokens, 8, 128, device="cuda").bfloat16().requires_grad_()
    step, forward, issued = 0, True, 0
    issue = SymmetricBackend.issue

    def kill() -> None:
        (Path(folder) / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def issue_some(backend: SymmetricBackend, prepared: DriverCalls) -> None:
        nonlocal issued
        issue(backend, prepared)
        issued = 0 if forward else issued + 1
        if rank == LOST and step == 2 and issued == 4:
            kill()

    def begun(_: str) -> AbstractContextManager[None]:
        if rank == LOST and step == 2 and not forward:
            kill()
        return nullcontext()

    if executor == "cpp":
        set_op_hook(begun)
    SymmetricBackend.issue = issue_some  # type: ignore[method-assign]
    for step in range(1000):  # noqa: B007
        forward = True
        out = ring_attn_func(x, x, x, plan, transport="symmetric")
        assert isinstance(out, torch.Tensor)
        forward = False
        out.sum().backward()
        assert x.grad is not None
        x.grad.sum().item()


@worlds(2, 4, soak=(3, 8))
@pytest.mark.parametrize("executor", ["cpp", "python"])
def test_a_rank_killed_in_mid_backward_ends_the_others(
    executor: str, world: int, tmp_path: Path
) -> None:
    """Each with a RingError on stderr that names a hop, within the timeout and 5 s."""
    require_gpus(world)
    processes, port = multiprocessing.get_context("spawn"), free_port()
    ranks = [
        processes.Process(target=_train, args=(rank, world, port, str(tmp_path), executor))
        for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        ranks[LOST].join(120)
        assert ranks[LOST].exitcode == -signal.SIGKILL, (tmp_path / f"{LOST}.log").read_text()
        killed = (tmp_path / "killed").stat().st_mtime
        for rank, process in enumerate(ranks):
            process.join(max(0.1, killed + TIMEOUT_S + 5 - time.time()))
            log = (tmp_path / f"{rank}.log").read_text()
            assert process.exitcode is not None, f"rank {rank} still runs; {log}"
            if rank != LOST:
                assert process.exitcode != 0, log
                error = re.search(r"RingError: rank \d: .*(hop \d: d?K/d?V|aborted: rank)", log)
                assert error, log
        print(f"the others ended {time.time() - killed:.1f} s after the kill")
    finally:
        for process in ranks:
            process.kill()
