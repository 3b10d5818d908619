"""If this fails, rings over peers' memory read K/V too early, or wait forever. The schedule of the
`symmetric` transport: proven free of hazards, and run in random orders.

The proof (`happens_before`) holds for any speeds of the streams. The runs (`simulation`) execute
`ring_pass` on memory that is NaN wherever it has no valid data, and compare the results.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from ringfa3.kernels import reference
from ringfa3.pass_interface import HopTensors
from ringfa3.planning.context_plan import ContextPlan
from ringfa3.planning.tile_schedule import Tiling
from ringfa3.symmetric.ring_pass import SymmetricRingPass
from ringfa3.symmetric.stream_ops import Copy, EndStart, Stream, WaitEvent
from tests.support.dense import attention, gradients, mask, tensors, worst
from tests.support.happens_before import Label, problems, waits
from tests.support.placements import (
    Placement,
    any_order,
    directions,
    in_order,
    laid_out,
    layers,
    scattered,
)
from tests.support.simulation import DeadlockError, SimulatedBackend, World

WORLDS = (2, 3, 4)
LENGTHS = {"dense": [32], "packed": [10, 1, 13, 8]}


def step(kind: str, world: int) -> list[Placement]:
    """Three layers on `world` ranks."""
    if kind == "one way":  # rank r's keys are seen by rank r + 1 alone
        return 3 * [laid_out([8 * world], world, "contiguous", (5, 0))]
    if kind == "contiguous":
        return 3 * [laid_out([8 * world], world, "contiguous")]
    if kind == "window":
        return 3 * [laid_out([8 * world], world, "zigzag", (3, 0))]
    if kind == "bidirectional":
        return 3 * [laid_out([8 * world], world, "zigzag", (-1, -1))]
    if kind == "in turn":
        return [step(other, world)[0] for other in ("dense", "one way", "contiguous")]
    return 3 * [laid_out(LENGTHS[kind], world)]


KINDS = ("dense", "packed", "one way", "contiguous", "window", "bidirectional", "in turn")
Forwards = tuple[str, ...]  # of the layers in turn
FORWARDS: list[Forwards] = [("forward",), ("gathered",), ("gathered", "forward", "gathered")]


# Proof


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forwards", FORWARDS, ids=str)
def test_no_order_of_events_is_a_hazard(kind: str, world: int, forwards: Forwards) -> None:
    """Two steps of training: no deadlock, no signal set before its last wait, no rows that one
    operation writes while another accesses them, no kernel that waits for more than copies; also if
    all streams share a queue."""
    calls = 2 * layers(step(kind, world), forwards)
    assert problems(calls) == []
    assert problems(calls, one_queue=True) == []


MANY = (pytest.mark.soak, pytest.mark.timeout(1800))


@pytest.mark.parametrize(
    ("world", "count"),
    [*((n, 15) for n in (2, 3, 4, 5)), *(pytest.param(n, 500, marks=MANY) for n in range(2, 9))],
)
def test_no_order_is_a_hazard_for_any_placement(world: int, count: int) -> None:
    """Documents in pieces on ranks in random order, another placement in each layer; then calls in
    no order of a step."""
    for seed in range(count):
        rng = random.Random(seed)
        placements = [scattered(rng, world) for _ in range(rng.randint(1, 3))]
        for calls in (layers(placements, FORWARDS[seed % 3]), in_order(any_order(rng, world))):
            assert problems(2 * calls) == [], seed
            assert problems(2 * calls, one_queue=True) == [], seed


@cache
def every_wait() -> list[tuple[Forwards, Label]]:
    """Waits of calls on 4 ranks: of forward and backward hop by hop, and of gathered forwards."""
    found = {
        forwards: dict.fromkeys(
            itertools.chain(*(waits(layers(step(k, 4), forwards)) for k in KINDS))
        )
        for forwards in FORWARDS[:2]
    }
    return [
        (forwards, wait)
        for forwards, labels in found.items()
        for wait in labels
        if forwards == FORWARDS[0] or not str(wait[0]).startswith("backward")
    ]


@cache
def steps_of_4() -> list[list[Placement]]:
    rng = random.Random(3)
    return [step(kind, 4) for kind in KINDS] + [
        [scattered(rng, 4) for _ in range(3)] for _ in range(120)
    ]


def orders_of_4(forwards: Forwards) -> Iterator[list[tuple[str, Placement]]]:
    """Steps, then calls in other orders."""
    yield from (directions(s, forwards) for s in steps_of_4())
    yield from (any_order(random.Random(seed), 4) for seed in range(200))


def test_every_wait_is_known_by_name() -> None:
    """The tests below leave out every wait that any placement has."""
    found = {w for s in steps_of_4() for f in FORWARDS for w in waits(layers(s, f))}
    assert found == {wait for _, wait in every_wait()}


@pytest.mark.parametrize(("forwards", "wait"), every_wait(), ids=str)
def test_no_wait_can_be_left_out(forwards: Forwards, wait: Label) -> None:
    """Without it, some placement or order of calls has a hazard, or a kernel that occupies SMs
    which another rank's kernel may need."""
    assert any(problems(2 * in_order(order), without=wait) for order in orders_of_4(forwards))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_start_issues_the_first_transfers(direction: str) -> None:
    """Both pulls; meanwhile the compute stream has waited for nothing."""
    operations = laid_out([64], 4).operations(direction, 1, 0)
    before = operations[: operations.index(EndStart())]
    assert sum(isinstance(x, Copy) for x in before) == 2
    waits = [x for x in before if isinstance(x, WaitEvent) and x.stream is Stream.COMPUTE]
    assert not waits


# Runs


class Ledger:
    """Two steps of training on simulated ranks, with whole numbers in place of attention.

    A kernel checks the K/V that it sees and stores (1 + its rank) times them as their dK/dV.
    """

    def __init__(self, order: Sequence[tuple[str, Placement]], **options: object) -> None:
        self.size = order[0][1].world
        self.world = World(self.size, **options)  # type: ignore[arg-type]
        self.wrong: list[str] = []
        for number, (direction, placement) in enumerate(2 * order):
            base = 1000.0 * (number + 1)  # other K/V in every call
            for rank in range(self.size):
                self._issue(placement, direction, rank, number, base)

    def _issue(self, placement: Placement, direction: str, rank: int, number: int,
               base: float) -> None:  # fmt: skip
        plan, backend = placement.plans[rank], self.world.backends[rank]
        keys = [base + 100 * r + torch.arange(p.local_tokens, dtype=torch.float64)
                for r, p in enumerate(placement.plans)]  # fmt: skip
        mine = keys[rank].view(-1, 1, 1)
        ring_pass = SymmetricRingPass(backend, plan, direction)
        ring_pass.start(mine, -mine)
        published = [keys[r][p.kv_exchange.published] for r, p in enumerate(placement.plans)]
        between = plan.kv_exchange.visible.tolist()

        def attend(hop: int, given: HopTensors) -> None:
            k, v = given.k, given.v
            if direction == "gathered":
                owners = [(rank - t) % self.size for t in range(1, self.size)]
                parts = [published[o][slice(*between[o][t])] for t, o in enumerate(owners, 1)]
                expected = torch.cat([keys[rank], *parts])
                if not (torch.equal(k.flatten(), expected) and torch.equal(v.flatten(), -expected)):
                    self.wrong.append(f"call {number}, rank {rank}: gathered K/V")
                return
            owner = (rank - hop) % self.size
            seen = slice(*between[owner][hop]) if hop else slice(None)
            if hop:
                expected = published[owner][seen]
                for x, sign in ((k, 1), (v, -1)):
                    if not torch.equal(x[seen].flatten() * sign, expected):
                        self.wrong.append(f"call {number}, rank {rank}, hop {hop}: K/V")
            for x, y in ((given.dk, k), (given.dv, v)):
                if x is not None:
                    x[seen] = y[seen] * (1 + rank)

        ring_pass.run(attend)
        if direction == "backward":
            weight = torch.full((plan.local_tokens,), 1.0 + rank, dtype=torch.float64)
            for hop in range(1, self.size):
                seen = plan.kv_exchange.published[slice(*between[rank][hop])]
                weight[seen] += 1 + (rank + hop) % self.size

            def check() -> None:
                for grad, sign in zip(ring_pass.grads, (1, -1), strict=True):
                    if not torch.equal(grad.flatten() * sign, keys[rank] * weight):
                        self.wrong.append(f"call {number}, rank {rank}: dK/dV")

            backend.then(check)

    def run(self, seed: int) -> list[str]:
        """Everything that was wrong."""
        try:
            self.world.run(random.Random(seed))
        except DeadlockError as stuck:
            self.wrong.append(f"deadlock:\n{stuck}")
        return self.wrong


OPTIONS: list[dict[str, bool]] = [
    {},
    {"one_queue": True},
    {"crowded": True},
    {"fork_join": True, "crowded": True},
    {"fork_join": True, "one_queue": True},
]
# The suite has every pair of world, forwards and options with every kind; `-m soak` has the others.
LAUNCHES = [
    pytest.param(world, forwards, options, marks=() if (w + f + o) % 3 == 0 else pytest.mark.soak)
    for w, world in enumerate(WORLDS)
    for f, forwards in enumerate(FORWARDS)
    for o, options in enumerate(OPTIONS)
]


@pytest.mark.parametrize(("world", "forwards", "options"), LAUNCHES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_hop_sees_what_it_should(
    kind: str, world: int, forwards: Forwards, options: dict[str, bool]
) -> None:
    """Exactly: K/V at each hop, and the owner's dK/dV, the sum of its visitors' contributions.

    Also with the streams of a rank in one queue, beside collectives of the job, and with fork and
    join in any parities.
    """
    assert Ledger(directions(step(kind, world), forwards), **options).run(world) == []


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=MANY)])
@pytest.mark.parametrize("world", WORLDS)
def test_every_hop_sees_what_it_should_on_any_placement(world: int, count: int) -> None:
    for seed in range(count):
        rng = random.Random(seed)
        placements = [scattered(rng, world) for _ in range(3)]
        orders = directions(placements, FORWARDS[seed % 3]), any_order(rng, world)
        options = {"one_queue": seed % 3 == 1, "crowded": seed % 2 == 1}
        options["fork_join"] = seed % 5 > 2
        for order in orders:
            assert Ledger(order, **options).run(seed) == [], seed


@pytest.mark.parametrize(("forwards", "wait"), every_wait(), ids=str)
def test_without_a_wait_something_goes_wrong(forwards: Forwards, wait: Label) -> None:
    """In at least one run of calls for which the proof fails too: stale data are read, or a kernel
    waits on the SMs for a rank that waits for a collective of the job."""
    crowded = "all_published" in wait
    for order in orders_of_4(forwards):
        if problems(2 * in_order(order), without=wait):
            for seed in range(10):
                if Ledger(order, without=wait, crowded=crowded).run(seed):
                    return
    pytest.fail("every run went well")


def attention_step(
    placements: Sequence[Placement], forwards: Forwards, seed: int, **options: object
) -> float:
    """The largest error of a step with the reference's attention, against the dense reference."""
    size = placements[0].world
    world = World(size, **options)  # type: ignore[arg-type]
    made: list[tuple[Tensor, Tensor]] = []
    backwards: list[Callable[[], None]] = []
    for layer, (forward, placement) in enumerate(
        directions(placements, forwards)[: len(placements)]
    ):
        kv_heads = 1 + size % 2  # one, which is not split, or two
        inputs, dout, dlse = tensors(layer, sum(placement.lengths), (2 * kv_heads, kv_heads), 2)
        allowed = mask(placement.lengths, placement.lengths, *placement.band)
        leaves = [x.clone().requires_grad_() for x in inputs]
        whole = attention(*leaves, allowed, 0.7)
        whole_grads = gradients(leaves, whole, dout, dlse)
        for rank, plan in enumerate(placement.plans):
            token = plan.token_index
            q, k, v = (x[token] for x in inputs)
            ring = Rank(world.backends[rank], plan, q, k, v)
            ring.forward(forward, placement.tilings(forward, rank))
            made += [(ring.out, whole[0][token]), (ring.lse, whole[1][:, token])]
            tilings = placement.tilings("backward", rank)
            backwards.append(
                partial(ring.backward, tilings, dout[token], dlse[:, token], made,
                        [g[token] for g in whole_grads])
            )  # fmt: skip
    for backward in reversed(backwards):
        backward()
    world.run(random.Random(seed))
    return worst(made)


class Rank:
    """One layer on one rank, as `ring.op` runs it. The run fills `out` and `lse`."""

    def __init__(self, backend: SimulatedBackend, plan: ContextPlan, q: Tensor, k: Tensor,
                 v: Tensor) -> None:  # fmt: skip
        self.backend, self.plan, self.qkv = backend, plan, (q, k, v)
        self.out, self.running = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
        self.lse = torch.full((q.shape[1], len(q)), torch.nan, dtype=q.dtype)

    def forward(self, direction: str, tilings: list[Tiling]) -> None:
        q, k, v = self.qkv

        def attend(hop: int, x: HopTensors) -> None:
            reference.attend(q, x.k, x.v, tilings[hop], 0.7, self.out, self.running, self.lse)

        ring_pass = SymmetricRingPass(self.backend, self.plan, direction)
        ring_pass.start(k, v)
        ring_pass.run(attend)

    def backward(self, tilings: list[Tiling], dout: Tensor, dlse: Tensor,
                 made: list[tuple[Tensor, Tensor]], expected: list[Tensor]) -> None:  # fmt: skip
        q, k, v = self.qkv
        statistics: list[Tensor] = []
        dq = torch.zeros_like(q)
        ring_pass = SymmetricRingPass(self.backend, self.plan, "backward")
        ring_pass.start(k, v)
        self.backend.then(
            lambda: statistics.extend(reference.preprocess(dout, self.out, self.lse, dlse))
        )

        def attend(hop: int, x: HopTensors) -> None:
            heads = slice(2 * x.first_head, 2 * (x.first_head + x.k.shape[1]))
            queries, out = (y[:, heads] for y in (dout, q)), dq[:, heads]
            rows, grads = (y[heads] for y in statistics), (x.dk, x.dv)
            reference.attend_backward(*queries, x.k, x.v, *rows, tilings[hop], 0.7, out, *grads)

        ring_pass.run(attend)
        self.backend.then(lambda: made.extend(zip((dq, *ring_pass.grads), expected, strict=True)))


@pytest.mark.parametrize("forwards", FORWARDS, ids=str)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_one_device(kind: str, world: int, forwards: Forwards) -> None:
    """Three layers, forward and backward, float64, 1e-12; rows that have not arrived are NaN."""
    assert attention_step(step(kind, world), forwards, 0) < 1e-12
