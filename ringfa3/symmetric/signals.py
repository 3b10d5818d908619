"""The words between the ranks of one host: host memory that all of them have mapped.

Streams set and await words by memory operations of the driver; the host does so by plain stores.
It must: while the queue of a stream is full, or a kernel is being loaded, the driver lets no call
of another thread in, and a stream that waits in vain has to go on all the same.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import torch

from ringfa3.errors import StepError, first_line
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.stream_ops import Purpose, Stream, Word

DIRECTORY = "/dev/shm"
BYTES = 4  # of a word
COUNTERS = 3  # of a stream: words taken; in graphs, number of what it awaits; 1 when that is over
AWAITED, OVER = 1, 2

Gather = Callable[[str], Sequence[str]]  # a line of every rank; returns when all have said theirs


def together(gather: Gather, what: str, step: Callable[[], object]) -> list[str]:
    """Takes a step and gives what each rank's step has given, as text.

    Raises:
        StepError: on all ranks, if the step failed on one.
    """
    given, wrong = "", ""
    try:
        given = str(step())
    except (RuntimeError, OSError) as problem:
        wrong = first_line(problem) or type(problem).__name__
    said = [json.loads(line) for line in gather(json.dumps([given, wrong, time.time()]))]
    # the first: others may have waited for that rank in vain
    if failed := min(
        ((at, rank) for rank, (_, wrong, at) in enumerate(said) if wrong), default=None
    ):
        rank = failed[1]
        raise StepError(f"{what} on rank {rank} of the group: {said[rank][1]}")
    return [given for given, _, _ in said]


class Words:
    """0 or 1 for each (receiver, sender, purpose, parity), and what each stream says of itself: a
    counter, and in graphs what it waits for and that something has come."""

    def __init__(self, rank: int, world: int, gather: Gather) -> None:
        """All ranks together. The current device is the one whose streams use the words.

        Raises:
            RuntimeError: on all ranks, if they have no memory in common.
        """
        self.rank = rank
        self._shape = (world, world, len(Purpose), 2)
        self._words = world * world * len(Purpose) * 2
        self._count = self._words + world * len(Stream) * COUNTERS
        path = together(gather, "a file for words", lambda: "" if rank else self._new_file())[0]
        try:
            together(gather, "mapping the words", lambda: self._map(path))
        finally:
            if rank == 0:
                os.unlink(path)

    def _new_file(self) -> str:
        file, path = tempfile.mkstemp(prefix="ringfa3-", dir=DIRECTORY)
        os.ftruncate(file, self._count * BYTES)  # all zero
        os.close(file)
        return path

    def _map(self, path: str) -> None:
        memory = torch.from_file(path, shared=True, size=self._count, dtype=torch.int32)
        self._address = cuda_driver.register(memory.data_ptr(), self._count * BYTES)
        self._mine = memory[: self._words].view(self._shape)[self.rank]
        counters = memory[self._words :].view(-1, len(Stream) * COUNTERS)[self.rank]
        self._counters = counters.numpy().data  # read often, without a tensor for each

    def address(self, word: Word) -> int:
        """For stream memory operations."""
        _, world, purposes, parities = self._shape
        index = (word.receiver * world + word.sender) * purposes + word.purpose
        return self._address + BYTES * (index * parities + word.parity)

    def counter(self, stream: Stream, kind: int = 0) -> int:
        """Address of a counter of this rank's stream."""
        first = self._words + self.rank * len(Stream) * COUNTERS
        return self._address + BYTES * (first + stream * COUNTERS + kind)

    def reached(self, stream: Hashable, count: int) -> bool:
        """Whether the stream has written `count` to its counter, or a later one; modulo 2^32."""
        found = self._counters[cast(Stream, stream) * COUNTERS]
        return (found - count) % (1 << 32) < 1 << 31

    def awaited(self, stream: Stream) -> int:
        """What the stream has said last that it waits for."""
        return self._counters[stream * COUNTERS + AWAITED]

    def over(self, stream: Stream) -> bool:
        """Whether the stream has said that waits are over since this was asked last."""
        at = stream * COUNTERS + OVER
        if not self._counters[at]:
            return False
        self._counters[at] = 0  # what it says in between is part of this answer
        return True

    def set_all(self) -> None:
        """Sets all words that this rank awaits, from the host."""
        self._mine.fill_(1)
