"""Ring calls that CUDA graphs can hold, and calls beside graphs: each begins behind and ends before
all else of its compute stream.

Else a call's side streams go on beside the next call, which awaits events of this one; in a graph
no event from outside can be awaited, and no host is asked at a replay. Enclosed, the calls of a
rank are in order, in whatever graph each is and however often that is replayed; then any parities
may follow on each other, as long as all ranks have the same.

A graph knows no order of issue: the device may run its operations one by one, in any order that
events allow. So what a rank takes must have been set by others in any such order:

* All READY words of a rank are set before it takes any word: the stream of dK/dV forks behind them.
* A kernel begins when all that it waits for inside is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringfa3.symmetric.stream_ops import (
    AttendAll,
    Await,
    Event,
    Operation,
    Record,
    Stream,
    Take,
)

FORKED = Event("forked", 0)
JOINED = Event("joined", 0)


def enclosed(operations: Sequence[Operation], captured: bool) -> list[Operation]:
    """The operations of a call, enclosed. captured: the device may run them in any order."""
    result: list[Operation] = []
    recorded: set[Event] = set()
    forked = not any(x.stream is Stream.GRADIENTS for x in operations)
    for operation in operations:
        if isinstance(operation, Await) and operation.event not in recorded:
            continue  # of a call before, which is over
        if isinstance(operation, Record):
            recorded.add(operation.event)
        if not forked and (isinstance(operation, Take) or operation.stream is Stream.GRADIENTS):
            result += _meet(Stream.GRADIENTS, Stream.KV, FORKED)
            forked = True
        if captured and isinstance(operation, AttendAll):
            result += _meet(Stream.COMPUTE, Stream.KV, Event("gathered", 0))
        result.append(operation)
    return [*result, *_meet(Stream.COMPUTE, Stream.KV, JOINED)]  # it has joined the other


def _meet(stream: Stream, other: Stream, event: Event) -> Iterable[Operation]:
    """The stream goes on behind what the other has so far."""
    return Record(other, event), Await(stream, event)
