"""CUDA's registration of host memory on a machine without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch


class Registrations:
    """Host memory that is pinned: ``pinned`` has its bytes by address, ``most`` their peak."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.asked: list[int] = []  # bytes of all calls
        self.most = 0

    def register(self, address: int, size: int, flags: int) -> int:
        assert address not in self.pinned
        assert flags == 1
        self.pinned[address] = size
        self.asked.append(size)
        self.most = max(self.most, sum(self.pinned.values()))
        return 0

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@contextmanager
def fake_pinning(device: torch.device) -> Iterator[Registrations]:
    """CUDA whose calls must name ``device``. All memory must be unpinned at the end."""
    made = Registrations()
    runtime = SimpleNamespace(cudaHostRegister=made.register, cudaHostUnregister=made.unregister)
    inside: list[torch.device] = []

    @contextmanager
    def on(chosen: torch.device) -> Iterator[None]:
        inside.append(chosen)
        yield
        inside.pop()

    def cudart() -> SimpleNamespace:
        assert inside == [device]
        return runtime

    with (
        mock.patch("torch.cuda.device", on),
        mock.patch("torch.cuda.cudart", cudart),
        mock.patch("torch.cuda.check_error"),
        mock.patch("torch.cuda.Stream"),
        mock.patch("torch.cuda.stream", return_value=nullcontext()),
    ):
        yield made
        assert not made.pinned
