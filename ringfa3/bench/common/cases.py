"""A case: the shape and the mask of one attention problem, and its exact FLOPs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from ringfa3.masks.mask import Mask
from ringfa3.planning.tile_schedule import Table
from ringfa3.planning.tiling import plan_local

CAUSAL, FULL = (-1, 0), (-1, -1)
FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = {"fwd": (FORWARD,), "bwd": (BACKWARD,), "both": (FORWARD, BACKWARD)}
# FLOPs per visible pair and head, by the columns of Q and K and by those of V: S and O; S, dQ and
# dK, dP and dV.
MATMULS = {FORWARD: (2, 2), BACKWARD: (6, 4)}
K = 1024
TREES = "8 trees of 4k + 16 x 1k"
FIRST_KEYS = "window and 4 first keys"


@dataclass(frozen=True)
class Case:
    """Attention over sequences of `lengths` tokens, all under the same mask.

    packed          True: sequences concatenated, (t, h, d); False: a batch (b, s, h, d)
    window          (left, right) keys around the diagonal, -1 for unlimited; causal is (-1, 0)
    equal_flops_of  label of the case whose baseline this causal sequence of equal FLOPs is
    keys            of each sequence of a batch; None: as many as its tokens
    scores          a key of `scores.SCORES`; None: inputs are standard normal
    v_dim           columns of V and O; None: `head_dim`
    spans           the mask of one packed sequence, in which every query attends to a key; None:
                    `window` decides
    """

    set: str
    label: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: tuple[int, int]
    packed: bool = False
    equal_flops_of: str | None = None
    keys: tuple[int, ...] | None = None
    scores: str | None = None
    v_dim: int | None = None
    spans: Mask | None = None

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.keys is None else self.keys

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def causal(self) -> bool:
        return self.window == CAUSAL and self.spans is None

    @property
    def mask(self) -> str:
        """One of "causal", "full", "window LEFT" and "spans"."""
        if self.spans is not None:
            return "spans"
        if self.window in (CAUSAL, FULL):
            return "causal" if self.causal else "full"
        return f"window {self.window[0]}"

    @property
    def cumulative(self) -> list[int]:
        """cu_seqlens: token offsets of the sequences, beginning with 0."""
        return list(accumulate(self.lengths, initial=0))

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head, from the plan's spans."""
        if self.spans is not None:
            return self.spans.pairs
        rows, keys = (np.array(n, np.int64) for n in (self.lengths, self.key_lengths))
        tiling = plan_local(rows, keys, *self.window).forward(128)[0]
        return visible_pairs(tiling.spans)

    def flops(self, direction: str) -> int:
        """Exact FLOPs of the matrix products: 4 (forward) or 10 (backward) x pairs x d x heads,
        where V has as many columns."""
        of_q, of_v = MATMULS[direction]
        columns = of_q * self.head_dim + of_v * (self.v_dim or self.head_dim)
        return columns * self.pairs * self.heads


def visible_pairs(spans: Table) -> int:
    """(row, column) pairs inside the bands of `spans`, whose rectangles do not overlap."""
    total = 0
    for span in spans:
        rows = np.arange(int(span["q1"]) - int(span["q0"]), dtype=np.int64)
        keys = int(span["k1"]) - int(span["k0"])
        begin = np.maximum(0, rows + int(span["lo"]))
        end = np.minimum(keys, rows + int(span["hi"]) + 1)
        total += int(np.maximum(0, end - begin).sum())
    return total


def documents(rng: random.Random, tokens: int, low: int, high: int) -> tuple[int, ...]:
    """Log-uniform lengths in [low, high) that sum to `tokens`; the last one is cut to fit."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(math.exp(rng.uniform(math.log(low), math.log(high))))
        lengths.append(min(left, length))
    return tuple(lengths)


def causal_of_equal_flops(case: Case) -> Case:
    """One causal sequence of s tokens with as many pairs, s (s + 1) / 2.

    s is rounded down to a multiple of 128 where it is at least 128.
    """
    seqlen = math.isqrt(2 * case.pairs)
    seqlen = seqlen // 128 * 128 or seqlen
    return replace(
        case,
        label=f"causal {seqlen}",
        lengths=(seqlen,),
        window=CAUSAL,
        packed=False,
        spans=None,
        equal_flops_of=case.label,
    )


def short(tokens: int) -> str:
    """16384 as 16k."""
    return f"{tokens // K}k" if tokens >= K and tokens % K == 0 else str(tokens)


def span_masks(shrink: int) -> dict[str, Mask]:
    """By label. Runs have at least 8 tokens: each is a span, and CPUs are slow with many."""
    tokens, size, width = 64 * K // shrink, max(8, 256 // shrink), max(8, 128 // shrink)
    images, blocks = min(100, tokens // (2 * size)), tokens // width
    begins = [i * tokens // images for i in range(images)]
    lengths = [4 * K // shrink, *[K // shrink] * 16]
    rng = random.Random(1)
    visible = {(i, i) for i in range(blocks)}  # every query attends to a key
    while len(visible) < blocks * blocks // 8:
        visible.add((rng.randrange(blocks), rng.randrange(blocks)))
    rows, columns = zip(*sorted(visible), strict=True)
    window = (K // shrink - 1, 0)
    return {
        f"{images} images": Mask.documents(tokens).with_bidirectional(
            begins, [begin + size for begin in begins]
        ),
        TREES: Mask.pack([Mask.tree(lengths, [-1] + [0] * 16)] * 8),
        FIRST_KEYS: Mask.documents(tokens, window_size=window, first_keys=4),
        "blocks of 128, 1 in 8": Mask.blocks(rows, columns, width, tokens),
    }


def of_spans(set_name: str, label: str, mask: Mask) -> Case:
    return Case(set_name, label, (mask.q_tokens,), 32, 8, 128, FULL, packed=True, spans=mask)


def without_spans(case: Case) -> Case:
    """What a mask of `spans` is compared with: the window without first keys, or a causal sequence
    of equal FLOPs."""
    if case.label != FIRST_KEYS:
        return causal_of_equal_flops(case)
    assert case.spans is not None
    left = -int(case.spans.diagonal_spans[:, 4].max())  # of the window; first keys are further left
    return replace(case, window=(left, 0), packed=False, spans=None)


def unfolded(case: Case) -> Case:
    """The sequences of a mask of trees, one by one: from a root to each leaf."""
    assert case.spans is not None
    positions = case.spans.positions
    leaves = np.flatnonzero(np.diff(positions, append=0) <= 0)  # the next node begins further up
    lengths = tuple((positions[leaves] + 1).tolist())
    return replace(case, lengths=lengths, window=CAUSAL, spans=None)
