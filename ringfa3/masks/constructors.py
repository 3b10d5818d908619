"""Spans of documents, trees and blocks, with the positions of their tokens.

Spans have the form of `masks.spans`. None of these constructors makes spans that overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ringfa3.masks.spans import UNLIMITED, Ints, empty, rectangles, subtract, tight
from ringfa3.validation import check_bool, check_window, shown, whole_number, whole_numbers


def ranges(count: Ints) -> Ints:
    """0, 1, ... count[i] - 1 for each i, concatenated."""
    offset = np.repeat(np.cumsum(count) - count, count)
    return np.arange(len(offset)) - offset


def listed(value: Any) -> Any:
    """Arrays and tensors as lists, other values as they are."""
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


def per_document(name: str, value: Any, documents: int, least: int) -> Ints:
    """(documents,) of one whole number, or of one for each document; None is -1."""
    value = listed(value)
    if isinstance(value, (list, tuple)):
        given = list(value)
    else:
        given = [None if value is None else whole_number(name, value)] * documents
    numbers = whole_numbers(name, [-1 if x is None else x for x in given])
    if len(numbers) != documents:
        raise ValueError(
            f"{name} has {len(numbers)} values, there are {documents} documents: give one value, "
            "or one for each document"
        )
    result = np.array(numbers, np.int64)
    if ((result < least) & ~((result == -1) & np.array([x is None for x in given], bool))).any():
        raise ValueError(f"{name}={shown(value)}: each must be at least {least}")
    return result


def windows_of(window_size: object, documents: int) -> tuple[Ints, Ints]:
    """(left, right) of each document, from one pair or one for each document."""
    window_size = listed(window_size)
    given: Sequence[object] = window_size if isinstance(window_size, (list, tuple)) else (0,)
    if all(isinstance(x, (list, tuple)) for x in given):
        if len(given) != documents:
            raise ValueError(
                f"window_size has {len(given)} pairs, there are {documents} documents: give one "
                "pair, or one for each document"
            )
        pairs = [check_window(x) for x in given]  # type: ignore[arg-type]
    else:
        pairs = [check_window(window_size)] * documents  # type: ignore[arg-type]
    table = np.array(pairs, np.int64).reshape(documents, 2)
    return table[:, 0], table[:, 1]


def document_spans(
    q0: Ints,
    k0: Ints,
    q_lengths: Ints,
    k_lengths: Ints,
    causal: bool,
    window_size: object,
    first_keys: object,
    chunk: object,
) -> Ints:
    """Arguments as in `Mask.documents`, with first tokens and lengths of documents."""
    count = len(q_lengths)
    causal = check_bool("causal", causal)
    left, right = windows_of(window_size, count)
    always = per_document("first_keys", first_keys, count, 0)
    size = per_document("chunk", chunk, count, 1)
    shift = k0 - q0 + k_lengths - q_lengths  # the diagonal of a row's own position
    lo = np.where(left < 0, -UNLIMITED, shift - np.minimum(left, UNLIMITED))
    hi = np.where(right < 0, UNLIMITED, shift + np.minimum(right, UNLIMITED))
    if causal:
        hi = shift
    # One rectangle a chunk. Its rows have the positions of its keys.
    unchunked = size < 0
    size = np.where(unchunked, np.maximum(k_lengths, 1), size)
    chunks = np.maximum(-(-k_lengths // size), 1)
    of = np.repeat(np.arange(count), chunks)
    begin = ranges(chunks) * size[of]
    end = begin + size[of]
    before = (k_lengths - q_lengths)[of]  # keys before the first row's own position
    whole = unchunked[of]  # also rows before the first key
    spans = np.stack(
        (
            q0[of] + np.where(whole, 0, np.clip(begin - before, 0, q_lengths[of])),
            q0[of] + np.where(whole, q_lengths[of], np.clip(end - before, 0, q_lengths[of])),
            k0[of] + begin,
            k0[of] + np.minimum(end, k_lengths[of]),
            lo[of],
            hi[of],
        ),
        axis=1,
    )
    spans = tight(spans)
    if (always > 0).any():
        last = np.minimum(always, k_lengths)
        highest = np.where(causal, shift, UNLIMITED)
        first = np.stack(
            (q0, q0 + q_lengths, k0, k0 + last, np.full(count, -UNLIMITED), highest), axis=1
        )
        spans = np.concatenate((spans, subtract(tight(first), spans)))
    return spans


def tree_spans(lengths: Ints, parents: Ints) -> tuple[Ints, Ints]:
    """(spans, positions): each node attends to itself, causally, and to all of its ancestors.

    One span a node, whatever the depth: its own and its descendants' rows over its keys. A node
    and its only child have one in common, so a chain is one document.

    Raises ValueError: the nodes are not in depth-first order.
    """
    end = np.cumsum(lengths)
    begin = end - lengths
    starts, above, sizes = begin.tolist(), parents.tolist(), lengths.tolist()
    position = [0] * len(above)  # of a node's first token
    last = end.tolist()  # of a node's descendants
    path: list[int] = []
    for node, parent in enumerate(above):
        while path and path[-1] != parent:
            last[path.pop()] = starts[node]
        if parent >= 0:
            if not path:
                allowed = "-1" if node == 0 else f"-1, node {node - 1} or one of its ancestors"
                raise ValueError(
                    f"parents[{node}]={parent}: allowed is {allowed}: give the nodes in "
                    "depth-first order"
                )
            position[node] = position[parent] + sizes[parent]
        path.append(node)
    total = int(lengths.sum())
    for node in path:
        last[node] = total
    rows = np.array(last, np.int64)
    joins = (parents[1:] == np.arange(len(above) - 1)) & (rows[1:] == rows[:-1])
    first, after = (np.append(*x)[: len(above)] for x in ((True, ~joins), (~joins, True)))
    q0, q1, k1 = begin[first], rows[first], end[after]
    spans = np.stack((q0, q1, q0, k1, np.full_like(q0, -UNLIMITED), q0 * 0), axis=1)
    positions = np.repeat(np.array(position, np.int64) - begin, lengths) + np.arange(total)
    return tight(spans), positions


def block_spans(rows: Ints, columns: Ints, size: int, q_tokens: int, k_tokens: int) -> Ints:
    """Blocks of size x size that are visible; neighbours in a row of blocks become one span."""
    if not len(rows):
        return empty()
    order = np.lexsort((columns, rows))
    rows, columns = rows[order], columns[order]
    joins = (np.diff(rows) == 0) & (np.diff(columns) == 1)
    (begin,) = np.nonzero(np.concatenate(([True], ~joins)))
    end = np.concatenate((begin[1:], [len(rows)])) - 1
    return rectangles(
        rows[begin] * size,
        np.minimum((rows[begin] + 1) * size, q_tokens),
        columns[begin] * size,
        np.minimum((columns[end] + 1) * size, k_tokens),
    )
