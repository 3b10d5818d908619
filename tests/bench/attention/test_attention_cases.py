"""If this fails, speeds of attention are divided by a wrong number of FLOPs, or a set lacks cases.
Cases of the benchmark: their masks, counted against brute force, and their sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringfa3.bench.attention.cases import HEAD_DIMS, SETS, select
from ringfa3.bench.attention.run import CPU_SHRINK
from ringfa3.bench.common.cases import (
    BACKWARD,
    CAUSAL,
    FIRST_KEYS,
    FORWARD,
    FULL,
    Case,
    causal_of_equal_flops,
    span_masks,
    unfolded,
    without_spans,
)
from ringfa3.bench.common.scores import TIMED, UNTIMED
from ringfa3.masks.mask import Mask
from tests.support.dense import mask


@pytest.mark.parametrize("window", [FULL, CAUSAL, (5, 0), (200, 0), (3, 7), (0, 0)], ids=str)
@pytest.mark.parametrize("lengths", [(130,), (1, 0, 17, 129), (64, 64)], ids=str)
def test_pairs_and_flops_equal_a_count_of_the_whole_mask(
    lengths: tuple[int, ...], window: tuple[int, int]
) -> None:
    case = Case("any", "any", lengths, 6, 3, 64, window, packed=True)
    pairs = int(mask(lengths, lengths, *window).sum())
    assert case.pairs == pairs
    assert case.flops(FORWARD) == 4 * pairs * 64 * 6
    assert case.flops(BACKWARD) == 2.5 * case.flops(FORWARD)


@pytest.mark.parametrize("window", [FULL, CAUSAL, (20, 3)], ids=str)
@pytest.mark.parametrize("keys", [50, 200])
def test_pairs_of_rectangles_equal_a_count_too(keys: int, window: tuple[int, int]) -> None:
    case = Case("any", "any", (130, 130), 6, 3, 64, window, keys=(keys, keys))
    assert case.pairs == int(mask(case.lengths, case.key_lengths, *window).sum())


def test_the_paper_s_set_has_its_shapes() -> None:
    found = select(["paper"])
    assert len(found) == 36
    for case in found:
        assert case.tokens == 16384
        assert case.heads * case.head_dim == 2048
        assert case.heads == case.kv_heads
    for d in (64, 128, 256):
        for window in (FULL, CAUSAL):
            lengths = [c.lengths[0] for c in found if (c.head_dim, c.window) == (d, window)]
            assert lengths == [512, 1024, 2048, 4096, 8192, 16384]


def test_long_sequences_share_kv_heads() -> None:
    found = select(["gqa"])
    assert {(c.heads, c.kv_heads, c.head_dim) for c in found} == {(32, 8, 128)}
    for causal in (False, True):
        lengths = [c.lengths[0] for c in found if c.causal is causal]
        assert lengths == [8192, 16384, 32768, 65536, 131072]


def test_few_kv_heads_and_hops_have_the_shapes_of_their_bars() -> None:
    few = select(["mqa"])
    assert {(c.heads, c.head_dim, c.lengths) for c in few} == {(32, 128, (8192, 8192))}
    assert sorted((c.kv_heads, c.causal) for c in few) == [
        (1, False), (1, True), (2, False), (2, True),
    ]  # fmt: skip
    (case,) = select(["hops"])
    assert (case.lengths, case.keys, case.window) == ((8192,), (4096,), FULL)
    assert (case.heads, case.kv_heads, case.head_dim) == (32, 8, 128)
    assert case.flops(FORWARD) == 4 * 8192 * 4096 * 32 * 128


def test_the_deterministic_set_is_causal_at_8k() -> None:
    found = select(["deterministic"])
    assert all(c.causal and c.lengths == (8192, 8192) for c in found)
    shapes = [(c.head_dim, c.heads, c.kv_heads) for c in found]
    assert shapes == [(64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8)]


def test_head_dims_between_those_of_the_kernels_are_selected_by_kernel() -> None:
    dims = {n: {c.head_dim for c in select(["below"], [n])} for n in HEAD_DIMS}
    assert dims == {64: {40}, 128: {80, 96}, 256: {192}}
    assert {c.lengths for c in select(["below"])} == {(8192, 8192)}


def test_sinks_have_the_shape_of_their_bar() -> None:
    found = select(["sinks"])
    shapes = {(c.lengths, c.heads, c.kv_heads, c.head_dim) for c in found}
    assert shapes == {((8192,), 64, 8, 64)}
    assert [c.window for c in found] == [(128, 0), CAUSAL]


def test_scores_have_the_shapes_of_their_bars() -> None:
    found = select(["scores"])
    timed = [c for c in found if c.scores in TIMED and c.heads == c.kv_heads]
    assert {(c.lengths, c.heads * c.head_dim) for c in timed} == {((16384,), 2048)}
    named = {(c.scores, c.label, c.head_dim, c.window) for c in timed}
    assert named == {(n, n, d, w) for n in TIMED for d in HEAD_DIMS for w in (FULL, CAUSAL)}
    grouped = [c for c in found if c.heads != c.kv_heads]
    assert [(c.lengths, c.heads, c.kv_heads, c.head_dim, c.scores, c.window) for c in grouped] == [
        ((65536,), 32, 8, 128, "sigma 4", window) for window in (FULL, CAUSAL)
    ]
    untimed = {(c.scores, c.head_dim, c.window) for c in found if c.scores in UNTIMED}
    assert untimed == {(n, d, w) for n in UNTIMED for d in HEAD_DIMS for w in (FULL, CAUSAL)}
    assert len(found) == len(timed) + len(grouped) + len(untimed)


def test_rows_of_a_set_have_names_of_their_own() -> None:
    """A summary names its worst row by mask and label."""
    for name in SETS:
        found = select([name])
        assert len({(c.head_dim, c.mask, c.label) for c in found}) == len(found)


def test_every_mask_is_followed_by_a_causal_sequence_of_its_flops() -> None:
    found = select(["masks"])
    assert [len(c.lengths) for c in found if c.equal_flops_of is None] == [45, 7, 1, 1]
    assert [c.window[0] for c in found[4:] if c.equal_flops_of is None] == [4096, 1024]
    for case, causal in zip(found[::2], found[1::2], strict=True):
        assert case.tokens == 131072
        assert causal.equal_flops_of == case.label
        assert causal.causal
        assert len(causal.lengths) == 1
        assert causal.flops(FORWARD) == pytest.approx(case.flops(FORWARD), rel=0.02)


def test_documents_are_log_uniform_within_their_range() -> None:
    case = select(["masks"])[0]
    assert all(128 <= n < 16384 for n in case.lengths[:-1])
    below = np.mean(np.array(case.lengths) < 1448)  # the middle of the range in logarithms
    assert 0.3 < below < 0.7


def test_sets_shrink_and_are_selected_by_head_dim() -> None:
    assert {c.head_dim for c in select(["paper"], [256])} == {256}
    assert select(["gqa"], [64]) == []
    for name in SETS:
        whole, small = select([name]), select([name], shrink=256)
        assert max(c.tokens for c in small) * 256 == max(c.tokens for c in whole)
    assert all(min(c.lengths) > 0 for c in select(list(SETS), shrink=256))


def test_a_short_sequence_of_equal_flops_is_no_multiple_of_128() -> None:
    case = Case("any", "any", (50, 50), 1, 1, 64, CAUSAL, packed=True)
    assert causal_of_equal_flops(case).lengths == (71,)


def test_the_ablation_has_the_shape_of_the_paper_s_table_2() -> None:
    (case,) = select(["ablation"])
    assert case.lengths == (8448,) * 4
    assert (case.heads, case.kv_heads, case.head_dim, case.window) == (16, 16, 128, FULL)


def test_masks_of_a_smoke_run_have_few_spans() -> None:
    """The fallback takes a step for each span, so 200 or more would take minutes of a CPU."""
    for label, made in span_masks(CPU_SHRINK).items():
        assert 0 < len(made.spans) < 200, label
    labels = ["100 images", "8 trees of 4k + 16 x 1k", "window and 4 first keys"]
    assert list(span_masks(1)) == [*labels, "blocks of 128, 1 in 8"]


def test_a_mask_is_compared_with_a_sequence_of_its_flops_or_its_window() -> None:
    for case in select(["spans"]):
        other = without_spans(case)
        assert other.spans is None
        if case.label == FIRST_KEYS:
            assert (other.window, other.lengths) == ((1023, 0), case.lengths)
        else:
            assert other.causal
        assert other.flops(FORWARD) == pytest.approx(case.flops(FORWARD), rel=0.02)


def test_a_tree_unfolds_into_its_sequences() -> None:
    """Lengths in the order of the leaves, exactly."""
    (case,) = select(["tree"])
    assert unfolded(case).lengths == (5120,) * 128
    deep = Mask.pack([Mask.tree([3, 4, 5, 2], [-1, 0, 1, 0]), Mask.tree([7], [-1])])
    assert unfolded(replace(case, spans=deep)).lengths == (12, 5, 7)
    single = Mask.tree([3, 1, 1, 2], [-1, 0, 0, 0])  # the next node begins where a leaf has ended
    assert unfolded(replace(case, spans=single)).lengths == (4, 4, 5)
