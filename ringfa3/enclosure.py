"""Ring calls that CUDA graphs can hold, and calls beside graphs: each begins behind and ends before
all else of its compute stream.

Else a call's side streams go on beside the next call, which awaits events of this one; in a graph
no event from outside can be awaited, and no host is asked at a replay. Enclosed, the calls of a
rank are in order, in whatever graph each is and however often that is replayed; then any parities
may follow on each other, as long as all ranks have the same.

A graph knows no order of issue: the device may run its operations one by one, in any order that
events allow. So what a rank takes must have been set by others in any such order:

* All READY words of a rank are set before it takes any word: the partial stream forks behind them.
* A kernel begins when all that it waits for inside is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringfa3.operations import (
    Attend,
    AttendAll,
    Await,
    Event,
    Operation,
    Record,
    Stream,
    Take,
)

FORKED = Event("forked", 0)
JOINED = {stream: Event("joined", stream) for stream in (Stream.KV, Stream.PARTIAL)}


def enclosed(operations: Sequence[Operation], captured: bool) -> list[Operation]:
    """The operations of a call, enclosed. captured: the device may run them in any order."""
    result: list[Operation] = []
    recorded: set[Event] = set()
    forked = not any(x.stream is Stream.PARTIAL for x in operations)
    for operation in operations:
        if isinstance(operation, Await) and operation.event not in recorded:
            continue  # of a call before, which is over
        if isinstance(operation, Record):
            recorded.add(operation.event)
        if not forked and (isinstance(operation, Take) or operation.stream is Stream.PARTIAL):
            result += _meet(Stream.PARTIAL, Stream.KV, FORKED)
            forked = True
        if captured:
            result += _all_there(operation)
        result.append(operation)
    for stream, event in JOINED.items():
        if any(x.stream is stream for x in operations):
            result += _meet(Stream.COMPUTE, stream, event)
    return result


def _meet(stream: Stream, other: Stream, event: Event) -> Iterable[Operation]:
    """The stream goes on behind what the other has so far."""
    return Record(other, event), Await(stream, event)


def _all_there(work: Operation) -> Iterable[Operation]:
    """Before a kernel that waits inside: the copies, which are in their stream by now."""
    if isinstance(work, AttendAll):
        return _meet(Stream.COMPUTE, Stream.KV, Event("gathered", 0))
    if isinstance(work, Attend) and work.arrived is not None:
        return _meet(Stream.COMPUTE, Stream.PARTIAL, Event("there", work.hop))
    return ()
