"""If this fails, the watchdog ends a job whose graphs run as they should. The waits that streams in
graphs report, and how they are read."""

from __future__ import annotations

import ctypes
from unittest import mock

import torch

from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.cuda_graphs import ReplayWaits
from ringfa3.symmetric.signals import Signals
from ringfa3.symmetric.stream_ops import Stream


def perform(operations: list[cuda_driver.MemoryOp]) -> None:
    for x in operations:
        ctypes.c_uint32.from_address(x.address).value = x.value


def test_progress_is_another_wait_or_the_same_wait_again() -> None:
    """A poll that reads the same wait knows whether it belongs to another replay."""
    with mock.patch.object(cuda_driver, "register_host_memory", lambda address, _: address):
        words = Signals(0, 1, lambda line: [line])
    replays = ReplayWaits(words)
    kv = [replays.awaiting(Stream.KV, what) for what in ("hop 1", "hop 2", "hop 1")]
    assert replays.poll() == (False, [])
    perform([kv[0], replays.awaiting(Stream.GRADIENTS, "dK/dV")])
    assert replays.poll() == (True, ["hop 1", "dK/dV"])
    assert replays.poll() == (False, ["hop 1", "dK/dV"])
    perform([kv[1]])
    assert replays.poll() == (True, ["hop 2", "dK/dV"])
    perform([*replays.passed_ops(Stream.KV), kv[0], kv[1]])
    assert replays.poll() == (True, ["hop 2", "dK/dV"])
    assert replays.poll() == (False, ["hop 2", "dK/dV"])
    perform([*replays.passed_ops(Stream.KV), *replays.passed_ops(Stream.GRADIENTS)])
    assert replays.poll() == (True, [])
    assert replays.poll() == (False, [])


def test_counters_and_signals_do_not_overlap() -> None:
    """Every counter of every stream has a word of its own."""
    with mock.patch.object(cuda_driver, "register_host_memory", lambda address, _: address):
        ranks = [Signals(0, 1, lambda line: [line])]
    words = ranks[0]
    addresses = [words.counter(stream, kind) for stream in Stream for kind in range(3)]
    assert len({*addresses}) == 9
    words.set_all()
    assert all(ctypes.c_uint32.from_address(address).value == 0 for address in addresses)
    assert torch.equal(words._received, torch.ones_like(words._received))
