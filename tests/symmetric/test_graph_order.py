"""If this fails, graphs and eager ring calls in some order race with each other. Ring calls that
fork and join, proven for any sequence of calls and replays, and for any order in which a device may
run a graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from ringfa3.symmetric.cuda_graphs import FORKED, JOINED, fork_join
from ringfa3.symmetric.stream_ops import Operation, RecordEvent, Stream, WaitEvent
from tests.support.happens_before import SETTLED, Calls, problems, stuck
from tests.support.placements import Placement, directions, layers, scattered
from tests.symmetric.test_schedule import FORWARDS, KINDS, MANY, step

DIRECTIONS = ("forward", "gathered", "backward")


def placements_of(world: int, count: int) -> list[list[Placement]]:
    rngs = [random.Random(seed) for seed in range(count)]
    return [step(k, world) for k in KINDS] + [[scattered(r, world) for _ in range(3)] for r in rngs]


def call(
    placement: Placement,
    direction: str,
    parity: int = 0,
    captured: bool = True,
    change: Callable[[Sequence[Operation], bool], list[Operation]] = fork_join,
) -> tuple[str, list[list[Operation]]]:
    ranks = range(placement.world)
    return direction, [change(placement.operations(direction, r, parity), captured) for r in ranks]


def history(
    rng: random.Random, placements: list[Placement], forwards: tuple[str, ...], settled: bool = True
) -> Calls:
    """A few calls before the first capture; then any calls, captured or not, of any parities."""
    earlier = layers(placements, forwards)[: rng.randint(0, 6)]
    world = placements[0].world
    kinds = directions(placements, forwards)
    later = [rng.choice(kinds) for _ in range(6)]
    return [
        *earlier,
        *([(SETTLED, [[]] * world)] if settled else []),
        *(call(p, d, rng.randrange(2), rng.random() < 0.5) for d, p in later),
    ]


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=MANY)])
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_calls_that_fork_and_join_may_have_any_parities(world: int, count: int) -> None:
    """Graphs are replayed in any order and any number of times, beside other calls: no hazard, no
    deadlock, no signal set before its last wait; also if all streams share a queue."""
    for seed, placements in enumerate(placements_of(world, count)):
        calls = history(random.Random(seed), placements, FORWARDS[seed % 3])
        assert problems(calls) == [], seed
        assert problems(calls, one_queue=True) == [], seed


@pytest.mark.parametrize("count", [15, pytest.param(300, marks=MANY)])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_no_device_order_of_a_graph_hangs(world: int, direction: str, count: int) -> None:
    for placements in placements_of(world, count):
        for placement in placements:
            assert stuck(*call(placement, direction)) == []


def fork_at_once(operations: Sequence[Operation], captured: bool) -> list[Operation]:
    """The gradients' stream forks before KV_READY is set."""
    fork = RecordEvent(Stream.KV, FORKED), WaitEvent(Stream.GRADIENTS, FORKED)
    first: list[Operation] = [RecordEvent(Stream.COMPUTE, FORKED), fork[1]]
    return first + [x for x in fork_join(operations, captured) if x not in fork]


def wait_inside(operations: Sequence[Operation], _: bool) -> list[Operation]:
    """Kernels start before all blocks have arrived."""
    return fork_join(operations, captured=False)


@pytest.mark.parametrize(
    ("direction", "change"),
    [("backward", fork_at_once), ("gathered", wait_inside)],
)
def test_without_a_precaution_some_device_order_hangs(
    direction: str, change: Callable[[Sequence[Operation], bool], list[Operation]]
) -> None:
    found = [stuck(*call(s[0], direction, change=change)) for s in placements_of(3, 60)]
    assert any(found)


def test_without_a_join_some_history_is_a_hazard() -> None:
    """Without the join of the KV stream. The gradients' stream joins in every backward."""

    def without_join(operations: Sequence[Operation], captured: bool) -> list[Operation]:
        joined = WaitEvent(Stream.COMPUTE, JOINED)
        return [x for x in fork_join(operations, captured) if x != joined]

    def found(seed: int, placements: list[Placement]) -> list[str]:
        rng = random.Random(seed)
        kinds = rng.choices(directions(placements, FORWARDS[seed % 3]), k=6)
        return problems([call(p, d, rng.randrange(2), change=without_join) for d, p in kinds])

    assert any(found(*x) for x in enumerate(placements_of(4, 30)))


def test_calls_before_the_first_capture_must_have_ended() -> None:
    """The host waits until their waits for signals are over."""
    assert any(
        problems(history(random.Random(seed), placements, FORWARDS[seed % 3], settled=False))
        for seed, placements in enumerate(placements_of(4, 30))
    )
