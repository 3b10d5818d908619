"""If this fails, a forward takes more memory than it may, or is slower than it could be. The
forward mode over peers' memory: the rule's choice at known amounts of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from ringfa3 import plan_context
from ringfa3.symmetric.forward_mode import (
    FORWARD_MODE_ENV,
    budget_error,
    gathered_bytes,
    select_forward_mode,
)
from tests.support.strategies import Case, cases


def qk(h: int, hk: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(1, n, 128, dtype=dtype, device="meta") for n in (h, hk)]


def modes(heads: tuple[int, int], worlds: range, **options: object) -> list[str]:
    return [
        select_forward_mode(plan_context(4096 * n, (0, n), **options), *qk(*heads))  # type: ignore[arg-type]
        for n in worlds
    ]


@pytest.mark.parametrize(("heads", "last"), [((32, 8), 6), ((32, 4), 10), ((8, 8), 3)])
def test_it_gathers_where_that_takes_no_more_than_float32_o_and_two_blocks(
    heads: tuple[int, int], last: int
) -> None:
    """One sequence: K/V of n shards against K/V of 2 and float32 O, as large as K/V of
    heads / kv_heads shards in bf16."""
    gathered, hops = modes(heads, range(2, last + 1)), modes(heads, range(last + 1, last + 4))
    assert set(gathered) == {"gathered"}
    assert set(hops) == {"hops"}


def test_only_what_is_seen_counts() -> None:
    """A short window needs hardly more than the rank's own K/V, on any number of ranks."""
    assert set(modes((32, 8), range(2, 17), window_size=(128, 0))) == {"gathered"}
    plan = plan_context(4 * 4096, (0, 4), "contiguous", window_size=(128, 0))
    assert gathered_bytes(plan, qk(32, 8)[1]) == (4096 + 128) * 2 * 8 * 128 * 2


def test_nothing_is_gathered_if_nothing_is_published_or_arrival_words_run_out() -> None:
    whole = plan_context([0, 4096, 8192], (0, 2), "contiguous")
    assert select_forward_mode(whole, *qk(32, 8)) == "hops"
    assert modes((32, 1), range(32, 34)) == ["gathered", "hops"]


def test_the_environment_overrides_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("gathered", "hops"):
        monkeypatch.setenv(FORWARD_MODE_ENV, asked)
        assert set(modes((32, 8), range(2, 9))) == {asked}
    monkeypatch.setenv(FORWARD_MODE_ENV, "both")
    with pytest.raises(ValueError, match="RINGFA3_FORWARD='both': allowed are 'gathered', 'hops'"):
        modes((32, 8), range(2, 3))


def test_a_budget_bounds_what_is_gathered_and_received() -> None:
    """Exactly. One sequence of 4 shards: a rank gathers all, its own K/V too, or receives the
    blocks of two others at once."""
    shard = 4096
    for budget, mode in ((4 * shard, "gathered"), (4 * shard - 1, "hops"), (3 * shard, "hops")):
        plan = plan_context(4 * shard, (0, 4), kv_budget=budget)
        assert select_forward_mode(plan, *qk(32, 8)) == mode
        assert budget_error(plan) is None
    # Both neighbours need 60 rows, of either end of each block of 256. By messages 60 come at once.
    plan = plan_context(2048, (3, 8), "contiguous", False, (60, 60), kv_budget=180)
    assert "kv_budget=180: transport 'symmetric' holds 768 rows" in str(budget_error(plan))
    assert "give kv_budget=768 or more, or transport='nccl'" in str(budget_error(plan))


@given(case=cases)
def test_ranks_agree(case: Case) -> None:
    plans = case.plans()
    assert len({select_forward_mode(plan, *qk(4, 2)) for plan in plans}) == 1
    assert len({plan.kv_exchange.max_rows for plan in plans}) == 1


@given(case=cases)
def test_gathered_blocks_are_contiguous(case: Case) -> None:
    """Own rows, then exactly the visible rows of each hop, in the order of the hops."""
    for plan in case.plans():
        move, end = plan.kv_exchange, plan.local_tokens
        first, rows = move.gathered_layout(plan.rank)
        assert first[0] == 0
        for hop in range(1, plan.world):
            seen = move.visible[(plan.rank - hop) % plan.world, hop]
            assert first[hop] + seen[0] == end
            end += seen[1] - seen[0]
        assert rows == end <= move.max_rows.gathered
