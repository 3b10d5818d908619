"""Arguments of masks as arrays: each function checks what it converts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.masks.spans import Ints
from ringfa3.validation import (
    INT64_END,
    cumulative_bytes,
    sequence_lengths,
    shown,
    whole_number,
)

MAX_TOKENS = 1 << 31


def token_counts(q_tokens: int, k_tokens: int) -> tuple[int, int]:
    """Two numbers of tokens. Raises ValueError, TypeError: one is none, or too large."""
    q, k = whole_number("q_tokens", q_tokens), whole_number("k_tokens", k_tokens)
    if not (0 <= q < MAX_TOKENS and 0 <= k < MAX_TOKENS):
        raise ValueError(f"q_tokens, k_tokens = {q}, {k}: allowed are 0 to 2^31 - 1")
    return q, k


def document_lengths(name: str, cu: Any) -> Ints:
    found = np.frombuffer(cumulative_bytes(name, cu), np.int64).tolist()
    return np.array(sequence_lengths(name, found), np.int64)


def tokens_in_use(name: str, used: Any, lengths: Ints) -> Ints:
    """(documents,) of `lengths` tokens, all of them for None."""
    if used is None:
        return lengths
    found = integers(name, used, (len(lengths),))
    wrong = np.flatnonzero((found < 0) | (found > lengths))
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"{name}: document {i} uses {found[i]} of {lengths[i]} tokens: give at least 0, at "
            "most all"
        )
    return found


def integers(name: str, values: npt.ArrayLike, shape: tuple[int, ...]) -> Ints:
    """An int64 copy. Raises TypeError: values are no whole numbers; ValueError: another shape."""
    try:
        given: Any = values
        if isinstance(given, torch.Tensor):
            given = given.detach().cpu().numpy()
        if not isinstance(given, Iterable):  # items alone, as of a BlockMask, may have no end
            raise TypeError
        array = np.array(given if hasattr(given, "__len__") else list(given))
        if array.size and (array.dtype.kind not in "iu" or array.max() >= INT64_END):
            raise TypeError(f"{array.dtype}")
    except (TypeError, ValueError) as problem:  # also of one number, and of rows that differ
        raise TypeError(
            f"{name}={shown(values)}: give whole numbers, finite ones, of shape {shape}, where -1 "
            "is any length"
        ) from problem
    if array.size == 0 and (-1 in shape or 0 in shape):
        return np.zeros([0 if n < 0 else n for n in shape], np.int64)
    if array.ndim != len(shape) or any(
        n not in (m, -1) for m, n in zip(array.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {array.shape}: give {shape}, -1 is any length")
    return array.astype(np.int64, copy=False)


def checked_spans(spans: Ints, q_tokens: int, k_tokens: int) -> Ints:
    """Spans with local bands. Raises ValueError: one has bounds that are not allowed."""
    q0, q1, k0, k1, lo, hi = spans.T
    good = (q0 >= 0) & (q0 <= q1) & (q1 <= q_tokens) & (k0 >= 0) & (k0 <= k1) & (k1 <= k_tokens)
    good &= (lo <= hi) & (np.abs(lo) <= MAX_TOKENS) & (np.abs(hi) <= MAX_TOKENS)
    if not good.all():
        at = int(np.argmin(good))
        raise ValueError(
            f"spans[{at}] = (q0, q1, k0, k1, lo, hi) = {tuple(spans[at].tolist())}: needs "
            f"0 <= q0 <= q1 <= {q_tokens}, 0 <= k0 <= k1 <= {k_tokens}, lo <= hi, both within 2^31"
        )
    return spans


def checked_positions(name: str, values: Any, tokens: int) -> Ints | None:
    if values is None:
        return None
    found = integers(name, values, (-1,))
    if len(found) != tokens or (tokens and found.min() < 0):
        raise ValueError(
            f"{name} has {len(found)} values from {found.min() if len(found) else 0} on: give "
            f"{tokens}, at least 0"
        )
    return found


def read_only(positions: Ints | None, tokens: int) -> Ints:
    found = np.arange(tokens) if positions is None else positions
    found.setflags(write=False)
    return found


def checked_blocks(
    rows: npt.ArrayLike, columns: npt.ArrayLike, size: int, q_tokens: int, k_tokens: int
) -> tuple[Ints, Ints, int]:
    """Numbers of blocks, and their size. Raises ValueError: one is outside, or there twice."""
    size = whole_number("size", size)
    if size < 1:
        raise ValueError(f"size={size}: it must be at least 1")
    row, column = integers("rows", rows, (-1,)), integers("columns", columns, (-1,))
    if len(row) != len(column):
        raise ValueError(f"rows has {len(row)} blocks, columns has {len(column)}")
    for name, x, tokens in (("rows", row, q_tokens), ("columns", column, k_tokens)):
        if len(x) and not 0 <= x.min() <= x.max() < -(-tokens // size):
            raise ValueError(
                f"{name} has blocks {x.min()} to {x.max()}; {tokens} tokens have blocks 0 to "
                f"{-(-tokens // size) - 1} of {size}"
            )
    both, count = np.unique(np.stack((row, column)), axis=1, return_counts=True)
    if len(count) and count.max() > 1:
        twice = both[:, count.argmax()].tolist()
        raise ValueError(f"block (row, column) = {tuple(twice)} is there twice: give it once")
    return row, column, size


def checked_runs(begins: npt.ArrayLike, ends: npt.ArrayLike, tokens: int) -> tuple[Ints, Ints]:
    """Runs [begin, end) in their order. Raises ValueError: they overlap or leave the tokens."""
    begin, end = integers("begins", begins, (-1,)), integers("ends", ends, (-1,))
    if len(begin) != len(end):
        raise ValueError(f"begins has {len(begin)} runs, ends has {len(end)}")
    order = np.lexsort((end, begin))
    begin, end = begin[order], end[order]
    bounds = np.stack((begin, end), 1).ravel()
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > tokens):
        raise ValueError(
            f"begins and ends go from {bounds[0]} to {bounds[-1]}: the mask has tokens 0 to "
            f"{tokens}"
        )
    if (np.diff(bounds) < 0).any():
        at = int(np.argmax(np.diff(bounds) < 0)) // 2
        runs = [(int(a), int(b)) for a, b in zip(begin[at : at + 2], end[at : at + 2], strict=True)]
        raise ValueError(f"runs [begin, end) = {runs} overlap, or end before they begin")
    return begin, end


def checked_prefixes(
    lengths: npt.ArrayLike, positions: Ints, used: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    """Runs [begin, end), the first tokens of each document; one begins where positions are 0.

    used: (tokens,) whether a token is in some pair; padding is in none.

    Raises ValueError, TypeError: as `Mask.with_prefix`.
    """
    (begin,) = np.nonzero(positions == 0)
    size = np.diff(np.append(begin, len(positions)))
    one = [lengths] * len(begin) if isinstance(lengths, (int, np.integer)) else lengths
    prefix = integers("lengths", one, (-1,))  # type: ignore[arg-type]
    if len(prefix) != len(begin) or (prefix > size).any() or (prefix < 0).any():
        raise ValueError(
            f"lengths={shown(lengths)}: give one prefix for each of the {len(begin)} documents "
            "with tokens, not longer than the document"
        )
    end = begin + prefix
    branches = np.diff(positions, prepend=-1) <= 0  # a token that does not continue a path
    branches[begin] = False
    for wrong, what in ((~used, "which is padding"), (branches, "which begins another branch")):
        before = np.append(0, np.cumsum(wrong))
        (bad,) = np.nonzero(before[end] > before[begin])
        if len(bad):
            first = int(begin[bad[0]])
            valid = int(np.argmax(wrong[first:]))
            raise ValueError(
                f"lengths={shown(lengths)}: the prefix of document {bad[0]} holds token "
                f"{first + valid}, {what}: give at most {valid}"
            )
    return begin, end
