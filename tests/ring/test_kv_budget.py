"""If this fails, rings take more memory than `kv_budget` allows. `plan_context(kv_budget=)`: rows
of the buffers of a ring by messages."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3 import ring_attn_func
from ringfa3.planning.context_plan import ContextPlan, plan_context
from ringfa3.planning.exchange.buffers import rows_of_buffers
from ringfa3.planning.exchange.landing import Landing
from ringfa3.planning.exchange.launches import launch_of_step
from ringfa3.ring.p2p import FakeTransport
from ringfa3.ring.p2p_pass import P2PRingPass
from tests.ring.test_landing import check_backward, check_forward, topologies
from tests.ring.test_ring_op import EXACT, dense_results, ring_results, shards_of
from tests.support.dense import cumulative, mask, tensors, worst
from tests.support.ranks import Ranks
from tests.support.ring_checks import DKV, KV, counted_rows, least_budget
from tests.support.strategies import Case, cases

MILLION = 1 << 20


def allocated(plan: ContextPlan) -> tuple[int, int]:
    """Rows of K/V and of dK/dV that a backward pass of the plan's rank allocates, without those of
    its own tokens."""
    k = torch.empty(plan.local_keys, 1, 8, dtype=torch.bfloat16, device="meta")
    with counted_rows(k.shape[1:]) as rows:
        P2PRingPass(FakeTransport(), plan, "backward").start(k, k)
    return rows[KV] // 2, rows[DKV] - plan.local_keys


@pytest.mark.parametrize("hosts", [1, 2, 16])
def test_a_document_of_a_million_tokens_on_16_ranks(hosts: int) -> None:
    """Exactly: rows of the tensors that a backward allocates. Ranks attend to up to 960k foreign
    rows. With a larger budget they have fewer launches."""
    least = least_budget(MILLION, (0, 16), hosts=hosts)
    numbers = []
    for budget in (least, 800_000):
        plans = [plan_context(MILLION, (r, 16), hosts=hosts, kv_budget=budget) for r in range(16)]
        moved = [plan.by_messages() for plan in plans]
        assert max(sum(x.rows[1:]) for x in moved) > 900_000
        held = [allocated(plan) for plan in plans]
        assert budget / 3 < max(kv for kv, _ in held) <= budget
        assert budget / 3 < max(grads for _, grads in held) <= budget
        (number,) = {len(x.rows) for x in moved}
        numbers.append(number)
    assert numbers[0] == 16 > numbers[1]


@settings(max_examples=30)
@given(case=cases, hosts=topologies, share=st.sampled_from([1.0, 1.3, 2.5]))
def test_rings_within_a_budget(case: Case, hosts: tuple[int, ...], share: float) -> None:
    """Packed documents and windows, exactly: pairs of the forward, sums of the backward, and rows
    that are allocated. Reference: the dense mask."""
    cu, world = np.cumsum([0, *case.lengths]).tolist(), len(hosts)
    given = case.layout, case.causal, case.window, hosts
    budget = int(share * least_budget(cu, (0, world), *given))
    plans = [plan_context(cu, (rank, world), *given, kv_budget=budget) for rank in range(world)]
    for plan in plans:
        assert max(allocated(plan)) <= budget
    allowed = mask(case.lengths, case.lengths, *case.band)
    check_forward(plans, allowed)
    check_backward(plans, allowed)


def _results(group: dist.ProcessGroup, hosts: tuple[int, ...]) -> None:
    """Forward and gradients of the least budget and of a large one: float64 to 1e-12."""
    for lengths, window in (([240], (-1, -1)), ([70, 1, 90, 33], (50, -1))):
        cu, everything = cumulative(lengths), tensors(0, sum(lengths), (4, 2), 4)
        given = "zigzag", True, window, hosts
        least = least_budget(cu, (0, len(hosts)), *given)
        expected = dense_results(lengths, True, window, everything)
        for budget in (least, 100 * least):
            plan = plan_context(cu, group, *given, kv_budget=budget)
            got = ring_results(plan, everything)
            pairs = list(zip(got, shards_of(plan, expected), strict=True))
            assert worst(pairs) < EXACT


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0), (0, 0, 1, 1)], ids=str)
def test_results_over_gloo(hosts: tuple[int, ...], ranks: Ranks) -> None:
    ranks.run(len(hosts), _results, hosts)


def _refused_in_8_bits(group: dist.ProcessGroup) -> None:
    plan = plan_context(256, group, kv_budget=1000)
    x = torch.randn(plan.local_tokens, 2, 64)
    for precision in ("fp8", "int8"):
        with pytest.raises(ValueError, match=f"'{precision}' with kv_budget=1000: .* no budget"):
            ring_attn_func(x, x, x, plan, precision=precision)


def test_calls_in_8_bits_refuse_a_budget(ranks: Ranks) -> None:
    ranks.run(2, _refused_in_8_bits)


def test_a_budget_is_part_of_a_plan_and_of_those_made_from_it() -> None:
    plan = plan_context(4096, (1, 4), kv_budget=4000)
    assert plan_context(4096, (1, 4)).digest != plan.digest
    assert plan_context(4096, (0, 4), kv_budget=4000).digest == plan.digest
    windowed = plan.with_window((100, -1))
    copy = pickle.loads(pickle.dumps(plan))
    for made in (plan, windowed, copy):
        assert made.kv_budget == 4000
    assert copy.digest == plan.digest
    assert plan_context(4096, (0, 1), kv_budget=1).kv_budget == 1  # nothing arrives


@pytest.mark.parametrize(
    ("budget", "error", "text"),
    [
        (0, ValueError, "kv_budget=0: give 1 row or more, or None for no budget"),
        (2.5, TypeError, "kv_budget=2.5: give a whole number"),
        ("1G", TypeError, "kv_budget='1G': give a whole number"),
        (6143, ValueError, "kv_budget=6143: .* have 6144 rows of K/V: give kv_budget=6144 or more"),
    ],
)
def test_a_wrong_budget(budget: object, error: type[Exception], text: str) -> None:
    """Rank 0 of 4 with 2048 tokens: two hops of all of another's rows arrive, and its own leave."""
    with pytest.raises(error, match=text):
        plan_context(8192, (0, 4), kv_budget=budget)  # type: ignore[arg-type]
    assert plan_context(8192, (0, 4), kv_budget=6144).kv_budget == 6144


@pytest.mark.parametrize("documents", [1, 60])
@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_rows_of_buffers_are_those_of_the_launches(hosts: int, documents: int) -> None:
    """Exactly. Reference: the rows that each rank's launches receive, send and pass on."""
    rng = np.random.default_rng(0)
    cumulative = [0, *np.cumsum(rng.integers(1, 3000, documents)).tolist()]
    expected = []
    for rank in range(8):
        exchange = plan_context(cumulative, (rank, 8), hosts=hosts).by_messages()
        landed = [chunk.rows for chunk in exchange.chunks]
        twice = exchange.rows[1::2], exchange.rows[2::2], landed[::2], landed[1::2]
        sent = ([len(rows) for rows in flow.sent] for flow in exchange.flows)
        expected.append(sum(max(rows, default=0) for rows in (*twice, *sent)))
    plan = plan_context(cumulative, (0, 8), hosts=hosts)
    landing = Landing.of(plan.kv_exchange, plan.hosts)
    launch = launch_of_step(plan.kv_exchange, landing)
    assert rows_of_buffers(plan.kv_exchange, landing, launch).tolist() == expected
    assert min(expected) > 0
