"""Whether a group can use the `symmetric` transport: every rank must support it and pass a test.

The test runs calls of each pass type on whole numbers that all ranks know. Their results must be
exact.
"""

from __future__ import annotations

import os
import time

import torch

from ringfa3.errors import IF_SLOW, first_line
from ringfa3.kernels.local_kv import LocalKVReference
from ringfa3.numa import host_name
from ringfa3.pass_interface import HopTensors
from ringfa3.planning.context_plan import plan_context
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.backend import Group, SymmetricBackend
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.stream_ops import BufferSpec

TEST_TOKENS = 2048  # of a rank, 128 numbers each
TEST_S = 30.0  # at most half the group's timeout: a rank that fails waits for the others
TEST_PASSES = ("backward", "forward", "forward", "backward", "gathered", "gathered")


def open_backend(group: Group, device: torch.device) -> SymmetricBackend | str:
    """The group's backend, or why it cannot have one; the same on all ranks."""
    lines = [line.split("\t") for line in group.gather("\t".join(_introduction(device)))]
    for rank, (_, _, reason) in zip(group.ranks, lines, strict=True):
        if reason:
            return f"rank {rank}: {reason}"
    hosts, gpus = ({line[i] for line in lines} for i in range(2))
    if len(hosts) > 1:
        return f"the group's ranks are on {len(hosts)} hosts"
    if len(gpus) < group.world:
        return f"{group.world} ranks share {len(gpus)} GPUs"
    backend, problem = None, ""
    timeouts: list[str] = []
    try:
        with torch.cuda.device(device):
            limit = min(TEST_S, group.timeout_s / 2)
            backend = SymmetricBackend(group, device, limit, timeouts.append)
            problem = _self_test(backend)
        if timeouts:
            problem = f"the self-test did not finish: {timeouts[0].removesuffix(IF_SLOW)}"
    except RuntimeError as error:
        if group.failure is not None:
            raise
        problem = first_line(error)
    ranks: dict[str, list[str]] = {}  # that have a problem; a step of all ranks is one of all
    for rank, found in zip(group.ranks, group.gather(problem), strict=True):
        if found:
            ranks.setdefault(found, []).append(str(rank))
    if ranks:
        if backend is not None:
            backend.abandon()  # its streams may wait for a call that a peer has broken off
        return "; ".join(f"rank {', '.join(who)}: {found}" for found, who in ranks.items())
    assert backend is not None
    backend.serve()
    return backend


def _introduction(device: torch.device) -> tuple[str, str, str]:
    """(host, GPU, why this rank cannot use the transport or "")."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return host_name(), gpu, unsupported_reason() or ""


def unsupported_reason() -> str | None:
    """Why this process cannot use the transport; None if nothing is known against it."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts transfers and kernels into one queue, so they "
            "cannot overlap: unset it"
        )
    try:
        cuda_driver.load()
    except cuda_driver.DriverError as problem:
        return str(problem)
    return None


def _self_test(backend: SymmetricBackend) -> str:
    """What is wrong with calls of each pass type and parity; "" if all are exact.

    In place of attention, rank r stores (r + 1) times the K/V that it receives as dK/dV. The ranks
    meet only to allocate the memory of all calls: if a rank fails later, the others wait for
    signals alone, and their streams are released.
    """
    rank, world, device = backend.group.rank, backend.group.world, backend.device
    plan = plan_context(world * TEST_TOKENS, (rank, world), "contiguous", causal=False)
    compute = torch.cuda.current_stream(device)
    generator = torch.Generator().manual_seed(0)  # the same numbers on all ranks
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    shape = (world, TEST_TOKENS, 2, 1, 128)
    keys = torch.empty(shape[1], *shape[3:], dtype=torch.bfloat16, device="meta")
    specs = [BufferSpec(plan, pass_type, keys) for pass_type in TEST_PASSES]
    backend.memory.reserve({b: size for spec in specs for b, size in spec.slot_bytes.items()})
    for pass_type in TEST_PASSES:
        drawn = torch.randint(-9, 10, shape, generator=generator, dtype=torch.int64, device="cpu")
        everyone = drawn.to(device, torch.bfloat16)
        mine = everyone[rank]

        def attend(hop: int, x: HopTensors, everyone: torch.Tensor = everyone) -> None:
            owners = [(rank - hop) % world]
            if x.arrivals is not None:
                owners = [(rank - t) % world for t in range(world)]
                words = [x.arrivals[t : t + 1].data_ptr() for t in range(1, world)]
                waits = [cuda_driver.wait(word, 1) for word in words]
                cuda_driver.issue([cuda_driver.batch_memory_ops(compute.cuda_stream, waits)[0]])
            wrong.add_((torch.stack((x.k, x.v), 1) != everyone[owners].flatten(0, 1)).sum())
            for gradient, keys_or_values in ((x.dk, x.k), (x.dv, x.v)):
                if gradient is not None:
                    gradient.copy_(keys_or_values.float() * (rank + 1))

        k, v = mine.unbind(1)
        ring_pass = _TestPass(backend, plan, pass_type)
        ring_pass.start(k, v, waits_in_kernel=True)
        ring_pass.run(attend)
        if pass_type == "backward":
            expected = (mine.float() * (world * (world + 1) // 2)).to(mine.dtype)
            wrong.add_((torch.stack(ring_pass.grads, 1) != expected).sum())
    done = _event()
    done.record(compute)
    while not done.query():  # type: ignore[no-untyped-call]
        time.sleep(0.01)
    return f"the self-test found {int(wrong)} wrong values" if int(wrong) else ""


class _TestPass(SymmetricRingPass):
    """Without kernels, which may have to be compiled while peers wait."""

    make_local_kv = staticmethod(lambda _, k, plan, *__: LocalKVReference(plan, k.device))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
