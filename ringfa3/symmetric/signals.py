"""Signals between the ranks of one host: words in host memory that all of them have mapped.

Streams set and wait for signals by memory operations of the driver. The host sets them by plain
stores. The driver blocks every thread that calls it while a stream's queue is full or a kernel
loads. A stream that waits in vain must be released even then.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import cast

import torch

from ringfa3.errors import StepError, first_line
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.shared_words import BYTES, map_words, shared_file
from ringfa3.symmetric.stream_ops import Purpose, Signal, Stream

COUNTERS = 3  # words of a stream: DONE, AWAITED, PASSED
DONE = 0  # how many waits of eager calls are over
AWAITED = 1  # in graphs: number of the wait that the stream is at, 0 for none
PASSED = 2  # in graphs: 1 when waits are over

# Until `Signals.close`: the driver knows these pages, and would not register others at their
# addresses.
_registered: list[torch.Tensor] = []

Gather = Callable[[str], Sequence[str]]  # passes a line, returns those of all ranks


def step_on_all_ranks(gather: Gather, what: str, step: Callable[[], object]) -> list[str]:
    """Takes a step on every rank and returns the results of all ranks, as text.

    Raises:
        StepError: on all ranks, if the step failed on one.
    """
    result, problem = "", ""
    try:
        result = str(step())
    except (RuntimeError, OSError) as error:
        problem = first_line(error) or type(error).__name__
    lines = [json.loads(line) for line in gather(json.dumps([result, problem, time.time()]))]
    # the earliest problem: other ranks may have waited for that rank in vain
    if failed := min(
        ((at, rank) for rank, (_, problem, at) in enumerate(lines) if problem), default=None
    ):
        rank = failed[1]
        raise StepError(f"{what} failed on rank {rank} of the group: {lines[rank][1]}")
    return [result for result, _, _ in lines]


class Signals:
    """A word for each (receiver, sender, purpose, parity), and counters for each stream.

    agreements  (2 * world,) int64 for agreements of the ranks, zeros at first
    """

    def __init__(self, rank: int, world: int, gather: Gather) -> None:
        """All ranks together. The current device is the one whose streams use the signals.

        Raises:
            StepError: on all ranks, if one cannot map the memory.
        """
        self.rank = rank
        self._shape = (world, world, len(Purpose), 2)
        self._signals = world * world * len(Purpose) * 2
        self._first_counter = self._signals + 2 * world * (8 // BYTES)
        self._count = self._first_counter + world * len(Stream) * COUNTERS
        with ExitStack() as opened:  # the first rank's file, until all ranks have mapped it

            def create_file() -> str:
                return "" if rank else opened.enter_context(shared_file(self._count))

            line = step_on_all_ranks(gather, "creating the signals' file", create_file)[0]
            step_on_all_ranks(gather, "mapping the signals", lambda: self._map(line))

    def _map(self, line: str) -> None:
        memory = map_words(line, self._count)
        self._address = cuda_driver.register_host_memory(memory.data_ptr(), self._count * BYTES)
        _registered.append(memory)
        self._memory = memory
        self._received = memory[: self._signals].view(self._shape)[self.rank]
        counters = memory[self._first_counter :].view(-1, len(Stream) * COUNTERS)[self.rank]
        self._counters = counters.numpy().data  # read often, without a tensor for each
        # aligned, as there is a signal for each of two parities
        agreements = memory[self._signals : self._first_counter].view(torch.int64)
        self.agreements = agreements.numpy().data

    def close(self) -> None:
        """Unmaps the words. No stream of any rank uses them any more."""
        memory = self._memory
        cuda_driver.unregister_host_memory(memory.data_ptr())
        _registered[:] = [other for other in _registered if other is not memory]
        del self._memory, self._received, self._counters, self.agreements

    def address(self, signal: Signal) -> int:
        """For stream memory operations."""
        _, world, purposes, parities = self._shape
        index = (signal.receiver * world + signal.sender) * purposes + signal.purpose
        return self._address + BYTES * (index * parities + signal.parity)

    def counter(self, stream: Stream, which: int = DONE) -> int:
        """Address of a counter of this rank's stream."""
        first = self._first_counter + self.rank * len(Stream) * COUNTERS
        return self._address + BYTES * (first + stream * COUNTERS + which)

    def reached(self, stream: Hashable, count: int) -> bool:
        """Whether `count` waits of the stream are over; counts are modulo 2^32."""
        done = self._counters[cast(Stream, stream) * COUNTERS]
        return (done - count) % (1 << 32) < 1 << 31

    def awaited(self, stream: Stream) -> int:
        """Number of the wait that the stream is at in a graph, 0 for none."""
        return self._counters[stream * COUNTERS + AWAITED]

    def take_passed(self, stream: Stream) -> bool:
        """Whether the stream has passed waits in graphs since the last call; clears its counter."""
        at = stream * COUNTERS + PASSED
        if not self._counters[at]:
            return False
        self._counters[at] = 0  # a 1 that the stream writes meanwhile belongs to this answer
        return True

    def set_all(self) -> None:
        """Sets all signals that this rank waits for, from the host."""
        self._received.fill_(1)
