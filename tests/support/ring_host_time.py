"""Microseconds of the host for a call of a ring, with a driver, messages and kernels that do
nothing.

`python -m tests.support.ring_host_time` prints the medians of both hosts, in turn: time that the
thread of one rank runs on the CPU, for an op without the checks and the agreement that Python's
call begins with. "first" is a plan's first call, with its tilings, tables and schedule; "prepared"
is the first call of a plan that a loader has prepared and sent. A forward prepares its backward. A
GPU's driver adds its own time to each call, launch and allocation.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from ringfa3 import KernelSpec, host, plan_context
from ringfa3.build.host_library import ensure_host_library
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring import op
from ringfa3.ring.p2p import Exchange, FakeTransport, _NcclExchange
from ringfa3.ring.p2p_pass import P2PRingPass
from ringfa3.ring.prepare_call import PreparedCall
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.backend import SymmetricBackend
from ringfa3.symmetric.forward_mode import FORWARD_MODE_ENV, FORWARD_MODES
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.signals import Signals
from tests.support.fake_cuda import Ranks
from tests.support.fake_driver import LoggedCuda
from tests.support.fake_group import FakeGroup
from tests.support.fake_kernels import SMS, FakeKernels, compile_kernels
from tests.support.host_time import ROUNDS, microseconds

CPU = torch.device("cpu")
WORLDS = (2, 4)
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 128, 16, 8, 64  # of a rank
SCALE = 0.125
WARM_UP = 4  # calls: of both parities one builds the program, one begins again


class Alone(FakeGroup):
    """A rank whose peers all say what it says."""

    def gather(self, line: object) -> list[object]:
        return [line] * self.world


PASS_TYPES = {"auto": "forward", "symmetric": "gathered"}  # by transport, which tells calls apart
MODES = {"forward": "hops", "gathered": "gathered", "backward": "hops"}  # of the environment


class NoMessages(FakeTransport):
    """Messages that take no time, and bring nothing."""

    def exchange(self, *_: object) -> Exchange:
        return _NcclExchange([])


def calls(plan: ContextPlan) -> dict[str, Callable[[], object]]:
    """By pass type."""
    q, dout, out = (torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16() for _ in range(3))
    k, v = (torch.randn(TOKENS, KV_HEADS, HEAD_DIM).bfloat16() for _ in range(2))
    lse = torch.randn(HEADS, TOKENS)
    settings = plan.handle, SCALE, False, "native"
    made: dict[str, Callable[[], object]] = {
        pass_type: partial(op.ring_attention, q, k, v, None, *settings, transport)
        for transport, pass_type in PASS_TYPES.items()
    }
    made["forward by messages"] = partial(op.ring_attention, q, k, v, None, *settings, "nccl")
    inputs = dout, None, q, k, v, out, lse, None
    for transport, name in ("auto", "backward"), ("nccl", "backward by messages"):
        made[name] = partial(op.ring_attention_backward, *inputs, *settings, transport)
    return made


def loaded(cut: int, world: int) -> ContextPlan:
    """A plan as a loader sends it, prepared for both forward modes."""
    plan = plan_context([0, cut, TOKENS * world], (0, world))
    spec = KernelSpec(HEADS, KV_HEADS, HEAD_DIM, num_sms=SMS, softmax_scale=SCALE)
    for mode in FORWARD_MODES:
        with mock.patch.dict(os.environ, {FORWARD_MODE_ENV: mode}):
            spec.prepare(plan)
    sent: ContextPlan = pickle.loads(pickle.dumps(plan))
    return sent


def prepare(backend: SymmetricBackend, *given: object, **_: object) -> PreparedCall:
    """In place of `prepare_call`, which takes CPU tensors to gloo."""
    plan, transport, direction = given[3], given[-2], given[-1]
    assert isinstance(plan, ContextPlan)
    if transport == "nccl":
        return PreparedCall(plan, str(direction), partial(P2PRingPass, NoMessages()))
    pass_type = PASS_TYPES[str(transport)] if direction == "forward" else "backward"
    return PreparedCall(plan, pass_type, partial(SymmetricRingPass, backend))


def agree(backend: SymmetricBackend, *given: Any) -> SymmetricBackend | None:
    """In place of `agree_prepared`."""
    _, _, stream, schedule, _ = given
    return backend if backend.is_ready(schedule, stream) else None


def measure(world: int, kernels: FakeKernels) -> dict[tuple[str, str], list[float]]:
    """Microseconds of each round, by pass type and host."""
    ranks = Ranks(world)
    ranks.cuda = cuda = LoggedCuda(0, kernels)
    ranks._rank_of[threading.get_ident()] = 0
    for name in cuda.entries:
        # an object of its own for each function of the driver, with its arguments
        nothing = ctypes.CDLL(kernels.library._name).fake_nothing
        nothing.argtypes, nothing.__name__ = cuda_driver._ARGUMENTS[name], name
        cuda.entries[name] = nothing
    times: dict[tuple[str, str], list[float]] = {}
    with (
        ranks._stand_in(),
        mock.patch.object(cuda_driver, "_entries", return_value=cuda.entries),
        mock.patch.object(SymmetricBackend, "compute", lambda _, __, work: work()),
        mock.patch.object(Signals, "reached", return_value=True),
    ):
        backend = SymmetricBackend(Alone(ranks, 0, 60.0), CPU, 60.0, print)  # type: ignore[arg-type]
        plan = plan_context(TOKENS * world, (backend.group.rank, world))
        by_type = calls(plan)
        stand_ins = {"prepare_call": prepare, "agree_prepared": agree}
        with mock.patch.multiple(op, **{n: partial(f, backend) for n, f in stand_ins.items()}):
            for call in by_type.values():
                call()  # room in the shared memory
            for number in range(ROUNDS + 1):
                for name in host.HOSTS:
                    host.select(name)
                    for pass_type, call in by_type.items():
                        for _ in range(WARM_UP):
                            call()
                        taken = microseconds(call)
                        if number:
                            times.setdefault((pass_type, name), []).append(taken)
                    cut = 8 + 2 * number + host.HOSTS.index(name)  # a plan that none has seen
                    fresh = plan_context([0, cut, TOKENS * world], (backend.group.rank, world))
                    for pass_type, call in calls(fresh).items():
                        taken = microseconds(call, 1)
                        if number:
                            times.setdefault((f"{pass_type}, first", name), []).append(taken)
            for name in host.HOSTS:
                host.select(name)
                plans = [loaded(9 + 2 * number, world) for number in range(2 * ROUNDS)]
                made = [calls(plan) for plan in plans]
                for by_type in made:
                    for pass_type, mode in MODES.items():  # plans prepare none by messages
                        with mock.patch.dict(os.environ, {FORWARD_MODE_ENV: mode}):
                            taken = microseconds(by_type[pass_type], 1)
                        times.setdefault((f"{pass_type}, prepared", name), []).append(taken)
    return times


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        kernels = FakeKernels(compile_kernels(Path(folder)))
        with kernels.stands_in():
            kernels.library.fake_idle(1)
            host.start(host.load(ensure_host_library()), "cpu", kernels.driver())
            for world in WORLDS:
                times = measure(world, kernels)
                title = f"microseconds, {world} ranks"
                print(f"{title:32}" + "".join(f"{name:>10}" for name in host.HOSTS))
                for pass_type in dict.fromkeys(pass_type for pass_type, _ in times):
                    medians = [np.median(times[pass_type, name]) for name in host.HOSTS]
                    print(f"{pass_type:32}" + "".join(f"{x:10.1f}" for x in medians))
            host.stop()


if __name__ == "__main__":
    main()
