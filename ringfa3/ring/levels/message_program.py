"""Passes by messages as programs of the C++ launcher.

The first call of a call signature builds the schedule of a pass. The launcher runs it, and calls
Python where messages start and where the pass waits for them: the transport is Python's.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ringfa3.host import library
from ringfa3.kernels import dispatch
from ringfa3.kernels.streams import CurrentStream
from ringfa3.kernels.symbolic import current_builder
from ringfa3.pass_interface import HostCode
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.ring.p2p import Exchange, Message, Transport
from ringfa3.schedules.encoded import EncodedSchedule
from ringfa3.schedules.link import Addresses, link, schedule_of, signature_of
from ringfa3.schedules.program_cache import ProgramCache
from ringfa3.schedules.steps import MessageTo

_programs: weakref.WeakKeyDictionary[ContextPlan, ProgramCache[Any]] = weakref.WeakKeyDictionary()


def run_program(
    transport: Transport,
    plan: ContextPlan,
    pass_type: str,
    k: torch.Tensor,
    inputs: tuple[torch.Tensor | None, ...],
    settings: Hashable,
    code: HostCode,
) -> tuple[torch.Tensor, ...] | None:
    """As `RingPass.run_schedule`. Python runs captures, and calls without a kernel.

    Raises what the transport raises.
    """
    launcher = library()
    if launcher is None or dispatch.unit_for("forward", k) is None:
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    known = _programs.setdefault(plan, ProgramCache())
    stream = CurrentStream.of(k.device)
    signature = signature_of(pass_type, inputs, settings)
    schedule = known.schedule(
        signature, lambda: schedule_of(plan, signature, inputs, code, use_prepared=False)
    )
    if schedule is None:
        return None
    found: EncodedSchedule = schedule
    program = known.get(
        (signature, k.device, stream.id),
        lambda: link(launcher, found, stream, Addresses.of_one_gpu(stream)),
    )
    messages = _CallMessages(transport, found)
    return tuple(launcher.run(program, inputs, stream.handle, (0, 0, 0), messages))


class _CallMessages:
    """`Messages` of csrc/host/program.h."""

    def __init__(self, transport: Transport, schedule: EncodedSchedule) -> None:
        self._transport, self._schedule = transport, schedule
        self._under_way: dict[int, Exchange] = {}

    def start(self, number: int, tensors: list[torch.Tensor]) -> None:
        sends, receives = self._schedule.exchanges[number]
        messages = [Message(x, *m) for x, m in zip(tensors, (*sends, *receives), strict=True)]
        count = len(sends)
        self._under_way[number] = self._transport.exchange(messages[:count], messages[count:])

    def wait(self, number: int) -> None:
        self._under_way.pop(number).wait()


class ScheduledExchange:
    """Messages in a schedule that this thread builds."""

    def __init__(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        sent, received = ([MessageTo(m.peer, m.what, m.tag) for m in x] for x in (sends, receives))
        tensors = [m.tensor for m in (*sends, *receives)]
        self._wait = current_builder().exchange(tensors, sent, received)

    def wait(self) -> None:
        self._wait()
