"""The order in which `NcclTransport` issues its operations, without a GPU."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfa3.ring.p2p import HEAD_START, Message, NcclTransport


class Done:
    """A message that has arrived."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def test_nccl_has_a_head_start_on_later_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream pauses after messages, and only if there are any."""
    order: list[Any] = []

    def post(messages: list[Any]) -> list[Done]:
        order.append(len(messages))
        return [Done() for _ in messages]

    monkeypatch.setattr(dist, "batch_isend_irecv", post)
    monkeypatch.setattr(dist, "P2POp", lambda *given: given)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(("pause", cycles)))
    group: Any = SimpleNamespace(rank=0, ranks=[0, 1], timeout=timedelta(seconds=5))
    transport = NcclTransport(group, p2p=group)
    try:
        message = Message(torch.zeros(1), 1, "forward hop 1: K/V", 0)
        transport.exchange([message], [message]).wait()
        assert order == [2, ("pause", HEAD_START)]
        transport.exchange([], []).wait()
        assert len(order) == 2
    finally:
        transport.close()
