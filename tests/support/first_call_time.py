"""Microseconds of the host for ring calls of a step, first calls of a plan included, in two
processes with checks and agreement, and with a driver and kernels that do nothing.

`python -m tests.support.first_call_time` prints for each call the median time that the thread of
rank 0 runs on the CPU: of a plan's first step, and of its third one. Each step comes after a
barrier, so code and data come from memory, as in training.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from ringfa3 import KernelSpec, host, plan_context
from ringfa3.build.host_library import ensure_host_library
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring import op, prepare_call
from ringfa3.ring.agreement import AgreementWords
from ringfa3.ring.group import RingGroup
from ringfa3.schedules.settings import Settings
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.signals import Signals
from tests.support.fake_cuda import Ranks
from tests.support.fake_driver import LoggedCuda
from tests.support.fake_kernels import SMS, FakeKernels, compile_kernels
from tests.support.ring_host_time import CPU, HEAD_DIM, HEADS, KV_HEADS, SCALE, TOKENS

WORLD, LAYERS, STEPS, WARM_UP = 2, 4, 30, 10
Times = dict[tuple[str, int], list[float]]
SPEC = KernelSpec(HEADS, KV_HEADS, HEAD_DIM, num_sms=SMS, softmax_scale=SCALE)


def connected(rank: int) -> SymmetricBackend:
    """The backend of a rank whose group agrees by words in shared memory."""
    ring = RingGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    settings = Settings({"of": "a first call"})
    ring.agree(settings)
    ring.begin(settings)
    ring._start_monitor()
    backend = SymmetricBackend(ring, CPU, 60.0, print)
    connections = ring.connections
    connections.backend, connections.last_transport = backend, "symmetric"
    connections.words = AgreementWords(backend.signals.agreements, rank, WORLD)
    return backend


def step(plan: ContextPlan, times: Times) -> None:
    """Forwards, then their backwards."""
    q, dout, out = (torch.randn(plan.local_tokens, HEADS, HEAD_DIM).bfloat16() for _ in range(3))
    k, v = (torch.randn(plan.local_tokens, KV_HEADS, HEAD_DIM).bfloat16() for _ in range(2))
    settings = plan.handle, SCALE, False, "native", "auto"

    def timed(name: str, layer: int, call: Callable[[], tuple[torch.Tensor, ...]]) -> torch.Tensor:
        begin = time.thread_time()
        results = call()
        times[name, layer].append((time.thread_time() - begin) * 1e6)
        return results[1]

    forward = partial(op.ring_attention, q, k, v, None, *settings)
    lses = [timed("forward", layer, forward) for layer in range(LAYERS)]
    for layer, lse in enumerate(lses):
        given = dout, None, q, k, v, out, lse, None
        timed("backward", layer, partial(op.ring_attention_backward, *given, *settings))


def loaded(cut: int, rank: int, prepared: bool) -> ContextPlan:
    """A plan that none has seen, as a loader sends it."""
    plan = plan_context([0, cut, TOKENS * WORLD], (rank, WORLD))
    _ = plan.digest
    sent = pickle.loads(pickle.dumps(plan.prepare([SPEC] if prepared else [])))
    return prepare_call.bind_to_group(sent)


def measure(rank: int) -> None:
    for number, prepared in enumerate((True, False)):
        first, again = defaultdict[tuple[str, int], list[float]](list), defaultdict(list)
        for count in range(WARM_UP + STEPS):
            plan = loaded(3 + count + number * (WARM_UP + STEPS), rank, prepared)
            for times in (first, defaultdict(list), again):
                dist.barrier()
                step(plan, times if count >= WARM_UP else defaultdict(list))
        if rank == 0:
            print(f"{'a prepared plan' if prepared else 'a plan':24}{'first step':>12}{'third':>8}")
            for (name, layer), values in first.items():
                found = np.median(values), np.median(again[name, layer])
                print(f"{f'{name}, layer {layer}':24}{found[0]:12.0f}{found[1]:8.0f}", flush=True)


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    kernels = FakeKernels(Path(folder) / "fake_kernels.so")
    ranks = Ranks(WORLD)
    ranks._rank_of[threading.get_ident()] = rank
    with kernels.stands_in(), torch.no_grad():
        kernels.library.fake_idle(1)
        host.start(host.load(ensure_host_library()), "cpu", kernels.driver())
        host.select("cpp")
        ranks.cuda = cuda = LoggedCuda(0, kernels)
        for name in cuda.entries:
            nothing = ctypes.CDLL(kernels.library._name).fake_nothing
            nothing.argtypes, nothing.__name__ = cuda_driver._ARGUMENTS[name], name
            cuda.entries[name] = nothing
        with (
            ranks._stand_in(),
            mock.patch.object(cuda_driver, "_entries", return_value=cuda.entries),
            mock.patch.object(SymmetricBackend, "compute", lambda _, __, work: work()),
            mock.patch.object(Signals, "reached", return_value=True),
        ):
            made = partial(SymmetricRingPass, connected(rank)), None
            with mock.patch.object(prepare_call, "connection", return_value=made):
                measure(rank)
            dist.barrier()
    os._exit(0)  # threads of the group run on


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        compile_kernels(Path(folder))
        command = [sys.executable, "-m", __spec__.name]
        started = [subprocess.Popen([*command, str(rank), folder]) for rank in range(WORLD)]
        while alive := [process for process in started if process.poll() is None]:
            if any(process.returncode for process in started):
                for process in alive:  # which wait for the one that has failed
                    process.kill()
            time.sleep(0.1)
        if any(process.returncode for process in started):
            sys.exit("first_call_time: a rank has failed, see above")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(int(sys.argv[1]), sys.argv[2])
    else:
        main()
