"""If this fails, rings are compared on unequal problems. The cases of `python -m ringfa3.bench
ring`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringfa3.bench.common.cases import FORWARD
from ringfa3.bench.ring.cases import FRESH, MAGI, RING_SETS, SPANS, packing
from ringfa3.bench.ring.load_balance import LoadBalance, plan_of_rank


def test_the_sets_have_the_sizes_of_their_names() -> None:
    whole = list(RING_SETS["lengths"](4, 1))
    assert [c.tokens // 1024 for c in whole] == [16, 32, 64, 128, 256]
    (documents,) = RING_SETS["documents"](4, 1)
    assert documents.tokens == 256 * 1024
    assert all(1024 <= n < 65536 for n in documents.lengths[:-1])
    (window,) = RING_SETS["window"](4, 1)
    assert (window.tokens, window.window) == (256 * 1024, (4096, 0))
    shards = [list(RING_SETS["memory"](world, 1)) for world in (2, 4)]
    for found, world in zip(shards, (2, 4), strict=True):
        assert [c.tokens // world // 1024 for c in found] == [4, 16, 64]
    assert [c.label for c in shards[0]] == [c.label for c in shards[1]]
    exact = list(RING_SETS["error"](4, 1))
    assert [c.tokens for c in exact] == [8192, 8192]
    (quick,) = RING_SETS["host"](4, 1)
    assert quick.tokens == 4096
    for world in (1, 4):
        blocks = [c.tokens // world // 1024 for c in RING_SETS["checkpoint"](world, 1)]
        assert blocks == [4, 16, 64]
    for case in (*whole, documents, window, *shards[0], *exact, quick):
        assert (case.heads, case.kv_heads, case.head_dim) == (32, 8, 128)
    for world in (4, 8):
        batches = list(RING_SETS["magi"](world, 1))
        assert len({case.lengths for case in batches}) == 4
        for case in batches:
            assert (case.heads, case.kv_heads, case.tokens) == (64, 8, 8192 * world)
            assert max(case.lengths) <= case.tokens // 4
        tokens = [case.tokens // world // 1024 for case in RING_SETS["mixes"](world, 1)]
        assert tokens == [4] * 8 + [8] * 8 + [32] * 8
    assert whole[0].flops(FORWARD) == 4 * 32 * 128 * (16384 * 16385 // 2) // 4


@pytest.mark.parametrize("world", [1, 4])
def test_each_seed_packs_other_documents(world: int) -> None:
    """In `FRESH`, up to a quarter of the tokens; the mix of `MAGI` is that of its own rows."""
    for case in RING_SETS[FRESH](world, 1):
        batches = [case.lengths, *(packing(case, str(seed)) for seed in range(20))]
        assert len(set(batches)) == 21
        assert packing(case, "7") == batches[8]
        for lengths in batches:
            assert sum(lengths) == case.tokens
            assert max(lengths) <= case.tokens // 4
        shortest = min(min(lengths[:-1]) for lengths in batches)  # the last one is cut
        assert (shortest < 64) == (case.mix is not None)
    first, *_ = RING_SETS[MAGI](world, 1)
    assert case == replace(first, set=FRESH, label="magi, 8k a GPU")


def test_masks_of_spans_are_balanced_and_send_what_a_window_needs() -> None:
    """On 2 ranks, by the plans: tokens, work within 2%; the 4 first keys are 4 more rows."""
    found = {case.label: LoadBalance.of(case, 128) for case in RING_SETS[SPANS](2, 1)}
    for case in RING_SETS[SPANS](2, 1):
        tokens = {plan_of_rank(case, rank).local_tokens for rank in range(2)}
        assert tokens == {case.tokens // 2}
        assert 1 <= found[case.label].imbalance <= 1.02
    trees, tree, first_keys, window = (x.kv_rows for x in found.values())
    assert (trees, first_keys - window) == (0, 4)
    assert 0 < tree < case.tokens
