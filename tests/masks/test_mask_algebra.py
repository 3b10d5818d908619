"""If this fails, a mask allows other pairs than its constructors state. `Mask` against numpy:
unions, intersections, constructors; what it refuses."""

from __future__ import annotations

import pickle
import re
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfa3 import Mask
from ringfa3.masks import spans as algebra
from ringfa3.masks.spans import intersect, subtract
from tests.support.dense import cumulative
from tests.support.dense import mask as dense_documents
from tests.support.masks import Dense, Endless, Span, Union, dense_span, spans, unions

COMMON = settings(max_examples=150)


def check_equal(mask: Mask, allowed: Dense) -> None:
    """The mask has these pairs, each in one span, and counts them."""
    np.testing.assert_array_equal(mask.dense(), allowed)
    covered = np.zeros(allowed.shape, int)
    for span in mask.spans.tolist():
        covered += dense_span(tuple(span), *allowed.shape)
    np.testing.assert_array_equal(covered, allowed)
    assert mask.pairs == allowed.sum()
    np.testing.assert_array_equal(mask.pairs_by_row, allowed.sum(1))


@COMMON
@given(union=unions(), rounds=st.sampled_from([0, 1, 32]))
def test_unions_and_intersections_are_those_of_their_pairs(union: Union, rounds: int) -> None:
    """Reference: numpy, exactly. The result is a mask again: its spans do not overlap."""
    with mock.patch.object(algebra, "MAX_ROUNDS", rounds):
        mask = union.mask()
    check_equal(mask, union.dense())
    assert Mask(mask.spans, union.q_tokens, union.k_tokens) == mask


@pytest.mark.soak
@settings(max_examples=2000)
@given(union=unions(30))
def test_many_unions(union: Union) -> None:
    check_equal(union.mask(), union.dense())


def test_a_span_that_meets_many_is_cut_first() -> None:
    """One round takes one of them from all parts of the span, so thousands took minutes."""
    single = Mask([[x, x + 1, x, x + 1, 0, 0] for x in range(0, 4000, 2)], 4000)
    with mock.patch.object(algebra, "_subtract_one", wraps=algebra._subtract_one) as rounds:
        both = single | Mask.documents(4000, window_size=(3, 0))
    assert rounds.call_count <= algebra.MAX_ROUNDS
    assert both.pairs == Mask.documents(4000, window_size=(3, 0)).pairs


@COMMON
@given(a=spans(12, 9), b=spans(12, 9))
def test_the_language_is_closed(a: Span, b: Span) -> None:
    """The intersection of two spans is at most one span, their difference at most six."""
    first, second = Mask([a], 12, 9), Mask([b], 12, 9)
    both = dense_span(a, 12, 9) & dense_span(b, 12, 9)
    assert len(intersect(first.diagonal_spans, second.diagonal_spans)) == int(both.any())
    assert len(subtract(second.diagonal_spans, first.diagonal_spans)) <= 6


@COMMON
@given(table=st.lists(spans(9, 9), max_size=4))
def test_an_overlap_is_an_error_that_names_both_spans_and_a_pair(table: list[Span]) -> None:
    """Reference: the sum of the spans' dense forms."""
    covered = sum((dense_span(s, 9, 9).astype(int) for s in table), np.zeros((9, 9), int))
    if covered.max() <= 1:
        check_equal(Mask(table, 9), covered > 0)
        return
    with pytest.raises(ValueError, match="overlap") as caught:
        Mask(table, 9)
    one, other, row, column = re.match(
        r"spans (\[.*\]) and (\[.*\]) overlap.* = \((\d+), (\d+)\)", str(caught.value)
    ).groups()  # type: ignore[union-attr]
    for span in (one, other):
        numbers = tuple(map(int, re.findall(r"-?\d+", span)))
        assert dense_span(numbers, 9, 9)[int(row), int(column)]  # type: ignore[arg-type]
    assert covered[int(row), int(column)] > 1


documents = st.lists(st.integers(0, 12), max_size=4)
window_sizes = st.tuples(*[st.sampled_from([-1, None, 0, 1, 3])] * 2)


@COMMON
@given(data=st.data(), causal=st.booleans(), cross=st.booleans())
def test_documents_have_a_window_first_keys_and_chunks_of_their_own(
    data: st.DataObject, causal: bool, cross: bool
) -> None:
    """Reference: the definition of each, pair by pair; documents align at the bottom right of the
    tokens in use."""
    lengths = data.draw(documents)
    count = len(lengths)
    keys = data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    keys = keys if cross else lengths
    windows = [data.draw(window_sizes) for _ in lengths]
    first = [data.draw(st.integers(0, 4)) for _ in lengths]
    chunks = [data.draw(st.sampled_from([None, 1, 3, 5])) for _ in lengths]
    padded = data.draw(st.booleans())  # queries and keys after those in use see nothing
    used = [[data.draw(st.integers(0, n)) if padded else n for n in x] for x in (lengths, keys)]
    if not cross:
        used[1] = used[0]
    allowed = np.zeros((sum(lengths), sum(keys)), bool)
    for d, (nq, nk) in enumerate(zip(*used, strict=True)):
        q0, k0 = sum(lengths[:d]), sum(keys[:d])
        for r in range(nq):
            for c in range(nk):
                p = r + nk - nq
                left, right = (n if n is not None and n >= 0 else 99 for n in windows[d])
                seen = p - left <= c <= p + right
                if chunks[d] is not None:
                    seen &= p // chunks[d] == c // chunks[d]
                seen |= c < first[d]
                allowed[q0 + r, k0 + c] = seen and (c <= p or not causal)
    cu_k = cumulative(keys) if cross else None
    in_use = {"seqused_q": used[0]} if padded else {}
    if padded and cross:
        in_use["seqused_k"] = used[1]
    mask = Mask.documents(cumulative(lengths), cu_k, causal, windows, first, chunks, **in_use)
    check_equal(mask, allowed)
    assert mask.positions.tolist() == [r for n in lengths for r in range(n)]
    assert mask.key_positions.tolist() == [c for n in keys for c in range(n)]


def test_one_window_is_for_all_documents() -> None:
    mask = Mask.documents([0, 5, 9], window_size=(2, 0))
    check_equal(mask, dense_documents([5, 4], [5, 4], 2, 0))
    assert mask == Mask.documents([0, 5, 9], window_size=[(2, 0), (2, None)])
    assert mask == Mask.documents([0, 5, 9], window_size=np.array([[2, 0], [2, -1]]))
    first = Mask.documents([0, 5, 9], window_size=torch.tensor([2, 0]), first_keys=[1, 0])
    assert first == Mask.documents([0, 5, 9], window_size=(2, 0), first_keys=torch.tensor([1, 0]))
    assert first.pairs == mask.pairs + 2
    assert len(Mask.documents(100, window_size=(9, 0), first_keys=4).spans) == 2


@COMMON
@given(data=st.data())
def test_a_node_of_a_tree_sees_its_ancestors(data: st.DataObject) -> None:
    """Reference: the path of each node. At most one span a node."""
    lengths, parents, path = [], [], []
    for node in range(data.draw(st.integers(0, 8))):
        depth = data.draw(st.integers(0, len(path)))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        lengths.append(data.draw(st.integers(0, 5)))
        path = [*path, node]
    begin = cumulative(lengths)
    allowed = np.zeros((begin[-1], begin[-1]), bool)
    positions = []
    for node, length in enumerate(lengths):
        before, above = 0, parents[node]
        while above >= 0:
            allowed[begin[node] : begin[node + 1], begin[above] : begin[above + 1]] = True
            before, above = before + lengths[above], parents[above]
        own = slice(begin[node], begin[node + 1])
        allowed[own, own] = np.tri(length, dtype=bool)
        positions += range(before, before + length)
    mask = Mask.tree(lengths, parents)
    check_equal(mask, allowed)
    assert mask.positions.tolist() == positions
    assert len(mask.spans) <= len(lengths)


def test_a_chain_of_nodes_is_one_span() -> None:
    """Nodes without tokens, and siblings without, part nothing."""
    mask = Mask.tree([4, 0, 3, 5, 0], [-1, 0, 1, 2, 2])
    assert mask.spans.tolist() == Mask.documents(12).spans.tolist()
    assert mask.positions.tolist() == list(range(12))


def test_blocks_may_be_short_at_the_end_and_meet_documents() -> None:
    mask = Mask.blocks([0, 0, 0, 2], [0, 1, 3, 2], 4, 10, 14)
    allowed = np.zeros((10, 14), bool)
    allowed[:4, :8] = allowed[:4, 12:] = allowed[8:, 8:12] = True
    check_equal(mask, allowed)
    assert len(mask.spans) == 3
    causal = Mask.blocks([0, 1, 1], [0, 0, 1], 4, 8) & Mask.documents([0, 3, 8])
    square = np.kron([[1, 0], [1, 1]], np.ones((4, 4))) > 0
    check_equal(causal, square & dense_documents([3, 5], [3, 5], -1, 0))
    assert causal.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_runs_and_prefixes_become_bidirectional() -> None:
    base = Mask.documents([0, 6, 6, 13], window_size=(1, 0))
    allowed = dense_documents([6, 7], [6, 7], 1, 0)
    for begin, end in ((1, 5), (9, 9), (9, 12)):
        allowed[begin:end, begin:end] = True
    check_equal(base.with_bidirectional([9, 1, 9], [12, 5, 9]), allowed)
    prefix = dense_documents([6, 7], [6, 7], -1, 0)
    prefix[:2, :2] = prefix[6:11, 6:11] = True
    check_equal(Mask.documents([0, 6, 6, 13]).with_prefix([2, 5]), prefix)
    padded = Mask.documents([0, 6, 13], seqused_q=[4, 7])
    assert padded.with_prefix([4, 7]) == padded.with_bidirectional([0, 6], [4, 13])
    whole = Mask.documents([0, 6, 13]).with_prefix(6)
    assert whole == Mask.documents([0, 6, 13]).with_bidirectional([0, 6], [6, 12])


def test_packed_masks_see_nothing_of_each_other() -> None:
    masks = [Mask.tree([2, 1, 3], [-1, 0, 0]), Mask.documents([0, 4, 5]), Mask([], 2)]
    allowed = np.zeros((13, 13), bool)
    at = 0
    for mask in masks:
        allowed[at : at + mask.q_tokens, at : at + mask.q_tokens] = mask.dense()
        at += mask.q_tokens
    packed = Mask.pack(masks)
    check_equal(packed, allowed)
    assert packed.positions.tolist() == [0, 1, 2, 2, 3, 4, 0, 1, 2, 3, 0, 0, 1]
    cross = Mask.pack([Mask.documents(2, 3, causal=False), Mask.documents(1, 2, causal=False)])
    assert (cross.q_tokens, cross.k_tokens, cross.pairs) == (3, 5, 8)
    assert cross.key_positions.tolist() == [0, 1, 2, 0, 1]
    assert Mask.pack([]).q_tokens == 0
    assert Mask.pack(iter(masks)) == packed  # type: ignore[arg-type]


def test_a_mask_is_a_value() -> None:
    """It hashes and compares by its content, is pickled, and does not change."""
    one, other = Mask.documents([0, 3, 9]), Mask.documents([0, 3, 9])
    shuffled = Mask(one.spans[::-1].copy(), 9, positions=one.positions)
    assert one == other == shuffled == pickle.loads(pickle.dumps(one))
    assert len({one, other, shuffled}) == 1
    assert one != Mask(one.spans, 9)  # other positions
    assert one != Mask.documents([0, 3, 9], causal=False)
    one_span, two_spans = (
        Mask([[0, 4, 0, 4, -3, 3]], 4),
        Mask([[0, 4, 0, 2, -3, 1], [0, 4, 2, 4, -3, 1]], 4),
    )
    assert one_span != two_spans  # the same pairs
    assert (one_span.dense() == two_spans.dense()).all()
    for array in (one.spans, one.positions, pickle.loads(pickle.dumps(one)).spans):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask([[0, 5, 0, 4, 0, 0]], 4), r"spans\[0\] = .* needs 0 <= q0 <= q1 <= 4"),
        (lambda: Mask([[0, 4, 0, 4, 1, 0]], 4), "lo <= hi"),
        (lambda: Mask([[0, 4, 0, 4, 0, np.inf]], 4), "give whole numbers, finite ones"),
        (lambda: Mask(torch.zeros(1, 6, requires_grad=True), 4), "spans=.*: give whole numbers"),
        (lambda: Mask(torch.zeros(1, 6, dtype=torch.bfloat16), 4), "spans=.*: give whole numbers"),
        (lambda: Mask([[0, 4, 0, 4]], 4), r"spans has shape \(1, 4\)"),
        (lambda: Mask([], -1), "q_tokens, k_tokens = -1, -1: allowed are 0"),
        (lambda: Mask([], 8.0), "q_tokens=8.0: give a whole number"),  # type: ignore[arg-type]
        (lambda: Mask([], 8, "9"), "k_tokens='9': give a whole number"),  # type: ignore[arg-type]
        (lambda: Mask(5, 4), "spans=5: give whole numbers"),
        (lambda: Mask(Endless(), 4), "spans=.*: give whole numbers"),  # type: ignore[arg-type]
        (lambda: Mask.documents(Endless()), "cu=.*: give a"),  # type: ignore[arg-type]
        (lambda: Mask.documents(4).plot(3), "plan=3 is no plan of the mask's 4 tokens"),
        (lambda: Mask([[0, 4], [0]], 4), r"spans=\[\[0, 4\], \[0\]\]: give whole numbers"),
        (lambda: Mask(np.array([[0, 4, 0, 4, 2**64 - 5, 0]], np.uint64), 4), "spans=.*: give"),
        (lambda: Mask([[0, 4, 0, 4, 2**70, 0]], 4), "spans=.*: give whole numbers"),
        (lambda: Mask([], 2, positions=[0]), "positions has 1 values"),
        (lambda: Mask.documents([0, 3], [0, 3, 4]), "cu has 1 documents, cu_k has 2"),
        (lambda: Mask.documents([0, 3], seqused_q=[4]), "seqused_q: document 0 uses 4 of 3 tokens"),
        (lambda: Mask.documents(3, 5, seqused_k=[-1]), "seqused_k: document 0 uses -1 of 5"),
        (lambda: Mask.documents([0, 3, 4], seqused_q=[2]), r"seqused_q has shape \(1,\): give"),
        (lambda: Mask.documents([0, 3, 4], seqused_q=[]), r"seqused_q has shape \(0,\): give"),
        (lambda: Mask.documents([0, 3], chunk=0), "chunk=0: each must be at least 1"),
        (lambda: Mask.documents(8, chunk=2.0), "chunk=2.0: give a whole number"),
        (lambda: Mask.documents(8, first_keys=True), "first_keys=True: give a whole number"),
        (lambda: Mask.documents(0, first_keys="a"), "first_keys='a': give a whole number"),
        (lambda: Mask.documents(8, first_keys=[1.5]), "first_keys=.*: give a sequence of whole"),
        (lambda: Mask.documents([0, 3], first_keys=-2), "first_keys=-2: each must be at least 0"),
        (lambda: Mask.documents([0, 3], first_keys=[1, 2]), "first_keys has 2 values"),
        (lambda: Mask.documents([0, 3], window_size=[(1, 0)] * 2), "window_size has 2 pairs"),
        (lambda: Mask.documents([0, 3], window_size=3), "window_size"),
        (lambda: Mask.tree([1, 1, 1, 1], [-1, 0, 1, 5]), r"parents\[3\]=5: .* depth-first"),
        (lambda: Mask.tree([1, 1, 1, 1], [-1, 0, 0, 1]), r"parents\[3\]=1: .* depth-first"),
        (lambda: Mask.tree([1], [0]), r"parents\[0\]=0"),
        (lambda: Mask.tree(8, [-1]), "lengths=8: give whole numbers"),  # type: ignore[arg-type]
        (lambda: Mask.tree([8], None), "parents=None: give whole numbers"),  # type: ignore[arg-type]
        (lambda: Mask.tree([-1], [-1]), "lengths must be at least 0"),
        (lambda: Mask.tree([1], [-2]), "parents at least -1"),
        (lambda: Mask.tree([2**62] * 4, [-1] * 4), "q_tokens has the number 18446744073709551616"),
        (lambda: Mask.tree([1, 2], [-1]), "lengths has 2 nodes, parents has 1"),
        (lambda: Mask.blocks([0, 0], [1, 1], 2, 4), r"\(0, 1\) is there twice"),
        (lambda: Mask.blocks([2], [0], 2, 4), "rows has blocks 2 to 2"),
        (lambda: Mask.blocks([0], [3], 2, 4, 6), "columns has blocks 3 to 3; 6 tokens"),
        (lambda: Mask.blocks([0], [-1], 2, 4), "columns has blocks -1 to -1"),
        (lambda: Mask.blocks([0, 1], [0], 2, 4), "rows has 2 blocks, columns has 1"),
        (lambda: Mask.blocks([0], [0], 0, 4), "size=0: it must be at least 1"),
        (lambda: Mask.blocks([0], [0], 2.0, 4), "size=2.0: give a whole"),  # type: ignore[arg-type]
        (lambda: Mask.documents(4).with_bidirectional([0, 1], [2, 3]), "overlap"),
        (lambda: Mask.documents(4).with_bidirectional([2], [5]), "from 2 to 5"),
        (lambda: Mask.documents(4, 6).with_bidirectional([0], [2]), "need self-attention"),
        (lambda: Mask.documents([0, 2, 4]).with_prefix([1]), "each of the 2 documents"),
        (
            lambda: Mask.documents([0, 3, 12], seqused_q=[3, 5]).with_prefix([3, 7]),
            r"\[3, 7\]: the prefix of document 1 holds token 8, which is padding: give at most 5",
        ),
        (lambda: Mask.tree([2, 1, 3], [-1, 0, 0]).with_prefix(4), "token 3, .* give at most 3"),
        (lambda: Mask.documents(4) | Mask.documents(5), r"\(4, 4\) and \(5, 5\)"),
        (lambda: Mask.documents([0, 2, 4]) & Mask.documents([0, 4]), "token 2 has 0 and 2"),
        (lambda: Mask([], 1 << 20).dense(), "more than 2"),
        (lambda: Mask.pack([3]), "must be a ringfa3.Mask, got int"),  # type: ignore[list-item]
        (lambda: Mask.pack(Mask([], 2)), r"masks=Mask.* as in \[mask\]"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_named(make: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()  # type: ignore[operator]


def test_counts_may_be_arrays_or_tensors() -> None:
    """Narrow integers do not wrap. Reference: the same masks of Python's ints, exactly."""
    mask = Mask.blocks([0, 2], [0, 2], 100, 300)
    for size in (np.int8(100), torch.tensor(100)):
        assert Mask.blocks([0, 2], [0, 2], size, torch.tensor(300)) == mask  # type: ignore[arg-type]
    assert Mask([[0, 4, 0, 4, -3, 0]], torch.tensor(4)) == Mask.documents(4)  # type: ignore[arg-type]


def test_an_iterator_of_tokens_in_use_is_read_once() -> None:
    assert Mask.documents([0, 3, 7], seqused_q=iter([2, 1])) == Mask.documents(
        [0, 3, 7], seqused_q=[2, 1]
    )
