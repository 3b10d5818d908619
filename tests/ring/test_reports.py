"""If this fails, ranks wait for the timeout after an error of another rank. An error anywhere
between the first and the last line of a call is reported to the peers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ringfa3 import RingError, plan_context, ring_attn_func
from ringfa3.ring import op
from ringfa3.ring.group import RingGroup
from tests.support.ranks import Ranks

Group = dist.ProcessGroup


class OutOfMemory(TorchDispatchMode):
    """The operation of a number raises, on whatever line it is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= func.namespace != "c10d"  # messages have errors of their own
        if self.left == 0:
            raise torch.OutOfMemoryError("no room")
        return func(*args, **(kwargs or {}))


def _unreported(group: Group, name: str) -> tuple[int, list[int]]:
    """How many operations a call has, and those whose errors no peer would learn.

    The same operation fails on all ranks, so that none waits for another. The group is not lost:
    messages of different calls never match.
    """
    reported: list[str] = []

    def fail(_: RingGroup, message: str) -> RingError:
        reported.append(message)
        return RingError(message)

    inner, silent = getattr(op, name), []
    plan = plan_context(96, group, "contiguous", causal=False)  # alike on both ranks
    x = torch.ones(plan.local_tokens, 2, 64, requires_grad=True)
    sink = torch.zeros(2, requires_grad=True)
    for number in range(1, 1000):
        mode = OutOfMemory(number)

        def limited(*args: Any, mode: OutOfMemory = mode) -> Any:
            with mode:
                return inner(*args)

        reported.clear()
        with mock.patch.object(op, name, limited), mock.patch.object(RingGroup, "fail", fail):
            try:
                out = ring_attn_func(x, x, x, plan, sink=sink)
                out.sum().backward()  # type: ignore[union-attr]
            except torch.OutOfMemoryError:
                if reported != ["OutOfMemoryError: no room"]:
                    silent.append(number)
            else:
                return number - 1, silent
    return 1000, silent


@pytest.mark.parametrize("name", ["run_forward", "run_backward"])
def test_every_operation_of_a_call_is_under_the_report(ranks: Ranks, name: str) -> None:
    for count, silent in ranks.run(2, _unreported, name):
        assert 10 < count < 1000
        assert silent == []
