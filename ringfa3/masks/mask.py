"""`Mask`: any union of spans, as a value that is made in a data loader and given to a plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringfa3.masks.arguments import (
    checked_blocks,
    checked_positions,
    checked_prefixes,
    checked_runs,
    checked_spans,
    document_lengths,
    integers,
    read_only,
    token_counts,
    tokens_in_use,
)
from ringfa3.masks.constructors import (
    block_spans,
    document_spans,
    ranges,
    tree_spans,
)
from ringfa3.masks.plot import plot
from ringfa3.masks.spans import (
    Bools,
    Ints,
    attended,
    cell,
    first_overlap,
    global_bands,
    intersect,
    local_bands,
    meet,
    pairs,
    pairs_by_row,
    rectangles,
    subtract,
    tight,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_CELLS = 1 << 28  # of `Mask.dense`


class Mask:
    """Which queries attend to which keys: a union of spans that do not overlap. It never changes.

    Row r of [q0, q1) attends to column c of [k0, k1) iff lo <= (c - k0) - (r - q0) <= hi. Masks can
    be pickled, and are equal if their spans, numbers of tokens and positions are: the same pairs
    cut into other spans are another mask.

    Args:
        spans: (n, 6) whole numbers, rows of q0, q1, k0, k1, lo, hi. Spans without a pair are
            dropped.
        q_tokens: number of queries.
        k_tokens: number of keys. Keys are the queries' tokens, self-attention, if it is None, or
            equal to q_tokens without key_positions.
        positions: (q_tokens,) position of each query in its document, for rotary embeddings;
            default 0, 1, 2, ...
        key_positions: (k_tokens,) the same of keys; default that of queries in self-attention.

    Attributes:
        spans: (n, 6) int64, read-only, sorted.
        q_tokens: number of queries. `k_tokens`: of keys.
        positions: (q_tokens,) int64, read-only. `key_positions`: (k_tokens,).

    Raises:
        ValueError, TypeError: a span leaves the tokens, has q0 > q1, k0 > k1 or lo > hi, or
            overlaps another one; the message names both and a pair that they share.
    """

    def __init__(
        self,
        spans: npt.ArrayLike,
        q_tokens: int,
        k_tokens: int | None = None,
        positions: npt.ArrayLike | None = None,
        key_positions: npt.ArrayLike | None = None,
    ) -> None:
        sizes = token_counts(q_tokens, q_tokens if k_tokens is None else k_tokens)
        self.q_tokens, self.k_tokens = sizes
        table = global_bands(checked_spans(integers("spans", spans, (-1, 6)), *sizes))
        self._set(
            tight(table),
            checked_positions("positions", positions, self.q_tokens),
            checked_positions("key_positions", key_positions, self.k_tokens),
        )
        overlap = first_overlap(self._spans)
        if overlap is not None:
            i, j = overlap
            both = meet(self._spans[[i]], self._spans[[j]])[0]
            raise ValueError(
                f"spans {self.spans[i].tolist()} and {self.spans[j].tolist()} overlap: both have "
                f"the pair (row, column) = {cell(both)}: give each pair to one span, or join masks "
                "with |"
            )

    def _set(self, spans: Ints, positions: Ints | None, key_positions: Ints | None) -> None:
        self._spans = spans[np.lexsort(spans.T[[5, 4, 3, 1, 2, 0]])]
        self._positions, self._key_positions = positions, key_positions
        self._spans.setflags(write=False)

    @classmethod
    def _of(
        cls,
        spans: Ints,
        q_tokens: int,
        k_tokens: int,
        positions: Ints | None = None,
        key_positions: Ints | None = None,
    ) -> Mask:
        """A mask of diagonal spans. The caller guarantees that they do not overlap."""
        mask = cls.__new__(cls)
        mask.q_tokens, mask.k_tokens = token_counts(q_tokens, k_tokens)
        mask._set(spans, positions, key_positions)
        return mask

    @classmethod
    def documents(
        cls,
        cu: Iterable[int] | int,
        cu_k: Iterable[int] | int | None = None,
        causal: bool = True,
        window_size: Any = (-1, -1),
        first_keys: Any = 0,
        chunk: Any = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
    ) -> Mask:
        """Packed documents; query document i attends to key document i.

        Args:
            cu: cumulative lengths from 0 on, a list or a tensor; or one int, one document's length.
            cu_k: those of keys, for cross-attention; documents of unequal length align at the
                bottom right. None: self-attention.
            causal: hide later keys of a document.
            window_size: (left, right) as in `plan_context`, or a list of pairs, one a document.
            first_keys: number of keys at the beginning of a document that stay visible outside
                the window and the chunk, unless `causal` hides them; or one number a document.
            chunk: attend only to keys of the same run of so many positions; None for no chunks;
                or one number a document.
            seqused_q, seqused_k: (documents,) queries and keys in use, the first ones of each
                document; the others are padding, in no pair. Alone seqused_q is for both, in
                self-attention.

        Raises ValueError, TypeError: an argument is wrong; the message names it.
        """
        lengths = document_lengths("cu", cu)
        keys = lengths if cu_k is None else document_lengths("cu_k", cu_k)
        if len(keys) != len(lengths):
            raise ValueError(
                f"cu has {len(lengths)} documents, cu_k has {len(keys)}: they must be equal"
            )
        sizes = token_counts(int(lengths.sum()), int(keys.sum()))
        used_q = tokens_in_use("seqused_q", seqused_q, lengths)
        same = seqused_k is None and cu_k is None
        used = used_q, used_q if same else tokens_in_use("seqused_k", seqused_k, keys)
        begin = np.cumsum(lengths) - lengths, np.cumsum(keys) - keys
        spans = document_spans(*begin, *used, causal, window_size, first_keys, chunk)
        return cls._of(spans, *sizes, ranges(lengths), None if cu_k is None else ranges(keys))

    @classmethod
    def tree(cls, lengths: Sequence[int], parents: Sequence[int]) -> Mask:
        """A tree of token runs: a node attends to itself, causally, and to all its ancestors.

        Several nodes without a parent are separate trees. Positions continue along each path.

        Args:
            lengths: tokens of each node, nodes in depth-first order.
            parents: number of each node's parent, -1 for none.

        Raises ValueError, TypeError: lengths and parents do not describe such a tree.
        """
        sizes, above = integers("lengths", lengths, (-1,)), integers("parents", parents, (-1,))
        if len(sizes) != len(above):
            raise ValueError(f"lengths has {len(sizes)} nodes, parents has {len(above)}")
        if len(sizes) and (sizes.min() < 0 or above.min() < -1):
            raise ValueError("lengths must be at least 0 and parents at least -1, which is none")
        total = token_counts(sum(sizes.tolist()), 0)[0]  # a sum of int64 may wrap to a small one
        spans, positions = tree_spans(sizes, above)
        return cls._of(spans, total, total, positions)

    @classmethod
    def blocks(
        cls,
        rows: Sequence[int],
        columns: Sequence[int],
        size: int,
        q_tokens: int,
        k_tokens: int | None = None,
    ) -> Mask:
        """A block-sparse mask: pairs of blocks of `size` queries and `size` keys are visible.

        Combine it with `& Mask.documents(...)` for a causal one.

        Args:
            rows, columns: (n,) numbers of each visible block's rows and columns.
            size: tokens of a block; the last one may be short.

        Raises ValueError, TypeError: a block is outside the tokens, or there twice.
        """
        sizes = token_counts(q_tokens, q_tokens if k_tokens is None else k_tokens)
        at = checked_blocks(rows, columns, size, *sizes)
        return cls._of(block_spans(*at, *sizes), *sizes)

    @classmethod
    def pack(cls, masks: Sequence[Mask]) -> Mask:
        """Masks one after the other, which attend to nothing of each other. Raises TypeError."""
        if not isinstance(masks, Iterable):
            raise TypeError(f"masks={masks!r}: give several masks, as in [mask]")
        masks = [check_mask(mask) for mask in masks]
        q, k = (
            np.array([getattr(m, x) for m in masks], np.int64) for x in ("q_tokens", "k_tokens")
        )
        q0, k0 = np.cumsum(q) - q, np.cumsum(k) - k
        spans = np.concatenate([np.zeros((0, 6), np.int64), *(m._spans for m in masks)])
        of = np.repeat(np.arange(len(masks)), [len(m._spans) for m in masks])
        spans[:, :2] += q0[of, None]
        spans[:, 2:4] += k0[of, None]
        spans[:, 4:] += (k0 - q0)[of, None]
        none = [np.zeros(0, np.int64)]
        at, keys = (
            np.concatenate(none + [getattr(m, x) for m in masks])
            for x in ("positions", "key_positions")
        )
        cross = any(m.cross or m._key_positions is not None for m in masks)
        return cls._of(spans, int(q.sum()), int(k.sum()), at, keys if cross else None)

    def with_bidirectional(self, begins: Sequence[int], ends: Sequence[int]) -> Mask:
        """The mask where the tokens of each run [begin, end) also attend to each other.

        For image tokens (Gemma 3) in a causal mask or in one with a window.

        Raises ValueError, TypeError: runs overlap or leave the tokens, or keys are other tokens.
        """
        if self.cross:
            raise ValueError(
                f"the mask has {self.q_tokens} queries and {self.k_tokens} keys: bidirectional "
                "runs need self-attention"
            )
        begin, end = checked_runs(begins, ends, self.q_tokens)
        return self | self._of(rectangles(begin, end, begin, end), self.q_tokens, self.k_tokens)

    def with_prefix(self, lengths: Sequence[int] | int) -> Mask:
        """A prefix-LM: the first tokens of each document also attend to each other.

        Documents begin where positions are 0.

        Args:
            lengths: tokens of the prefix of each document that has tokens, or one for all.

        Raises ValueError, TypeError: a prefix exceeds its document, or holds padding or tokens of
            two branches of a tree; or keys are other tokens.
        """
        used = pairs_by_row(self._spans, self.q_tokens) > 0
        if not self.cross:
            used |= attended(self._spans, self.k_tokens)
        runs = checked_prefixes(lengths, self.positions, used)
        return self.with_bidirectional(*runs)  # type: ignore[arg-type]

    def __or__(self, other: Mask) -> Mask:
        """What either of two masks allows."""
        positions = self._common_positions(other)
        spans = np.concatenate((self._spans, subtract(other._spans, self._spans)))
        return self._of(spans, self.q_tokens, self.k_tokens, *positions)

    def __and__(self, other: Mask) -> Mask:
        """What both of two masks allow."""
        positions = self._common_positions(other)
        spans = intersect(self._spans, other._spans)
        return self._of(spans, self.q_tokens, self.k_tokens, *positions)

    def _common_positions(self, other: Mask) -> list[Ints | None]:
        """Positions of two masks. Raises ValueError: they differ, or the numbers of tokens do."""
        check_mask(other)
        mine, theirs = (self.q_tokens, self.k_tokens), (other.q_tokens, other.k_tokens)
        if mine != theirs:
            raise ValueError(
                f"masks have (queries, keys) = {mine} and {theirs}: they must be equal"
            )
        common = []
        for name in ("_positions", "_key_positions"):
            a, b = getattr(self, name), getattr(other, name)
            if a is not None and b is not None and not np.array_equal(a, b):
                at = int(np.argmax(a != b))
                raise ValueError(
                    f"{name[1:]} of the masks differ: token {at} has {a[at]} and {b[at]}: make "
                    "both masks of the same documents"
                )
            common.append(b if a is None else a)
        return common

    @property
    def cross(self) -> bool:
        """Whether keys are other tokens than queries: cross-attention."""
        return self.q_tokens != self.k_tokens or self._key_positions is not None

    @cached_property
    def spans(self) -> Ints:
        spans = local_bands(self._spans)
        spans.setflags(write=False)
        return spans

    @property
    def diagonal_spans(self) -> Ints:
        """`spans` with bands as diagonals of the whole matrix: lo <= c - r <= hi."""
        return self._spans

    @cached_property
    def positions(self) -> Ints:
        return read_only(self._positions, self.q_tokens)

    @cached_property
    def key_positions(self) -> Ints:
        if self._key_positions is None and not self.cross:
            return self.positions
        return read_only(self._key_positions, self.k_tokens)

    @cached_property
    def pairs(self) -> int:
        """Number of (query, key) pairs that the mask allows."""
        return int(pairs(self._spans).sum())

    @cached_property
    def pairs_by_row(self) -> Ints:
        """(q_tokens,) int64: number of keys to which each query attends."""
        return pairs_by_row(self._spans, self.q_tokens)

    def dense(self) -> Bools:
        """(q_tokens, k_tokens) bool, True where a query attends to a key; of small masks.

        Raises ValueError: it has more than 2^28 elements.
        """
        if self.q_tokens * self.k_tokens > MAX_CELLS:
            raise ValueError(
                f"a dense mask of {self.q_tokens} x {self.k_tokens} has more than 2^28 elements"
            )
        allowed = np.zeros((self.q_tokens, self.k_tokens), bool)
        for q0, q1, k0, k1, lo, hi in self._spans.tolist():
            diagonal = np.arange(k0, k1) - np.arange(q0, q1)[:, None]
            allowed[q0:q1, k0:k1] |= (lo <= diagonal) & (diagonal <= hi)
        return allowed

    def plot(self, plan: Any = None) -> Figure:
        """A picture of the spans; with a plan of the mask's tokens, queries coloured by rank.

        Save it with `.savefig(path)`. Needs matplotlib.
        """
        return plot(self._spans, self.q_tokens, self.k_tokens, plan)

    @cached_property
    def digest(self) -> str:
        """Hash of spans, numbers of tokens and positions."""
        h = hashlib.sha256(np.array([self.q_tokens, self.k_tokens], np.int64).tobytes())
        h.update(self._spans.tobytes())
        for x in (self.positions, self.key_positions):  # a few runs
            at = np.flatnonzero(x[1:] - x[:-1] != 1) + 1
            h.update(np.concatenate((x[:1], at, x[at])).tobytes())
            h.update(b"positions")
        h.update(bytes([self.cross]))
        return h.hexdigest()[:16]

    def __getstate__(self) -> dict[str, object]:
        kept = ("q_tokens", "k_tokens", "_spans", "_positions", "_key_positions")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._spans.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        keys = f" x {self.k_tokens}" if self.cross else ""
        return f"Mask({self.q_tokens}{keys} tokens, {len(self._spans)} spans, {self.digest})"


def check_mask(mask: object) -> Mask:
    """The mask. Raises TypeError: it is none."""
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be a ringfa3.Mask, got {type(mask).__name__}: make one of spans, "
            "documents, trees or blocks; a function of indices has no spans"
        )
    return mask
