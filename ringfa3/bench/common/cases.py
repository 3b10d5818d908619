"""What is measured: shapes and masks, the sets they form, and their exact FLOPs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from ringfa3.planning.tiling import Table, plan_local

CAUSAL, FULL = (-1, 0), (-1, -1)
FORWARD, BACKWARD = "forward", "backward"
# Sets in which RingFA3 meets itself, each alone, and the direction that they are of.
ABLATION = "ablation"  # with parts of the kernel left out
MERGE = "merge"  # with other epilogues
DETERMINISTIC = "deterministic"  # with turns and without
ITSELF = {ABLATION: FORWARD, MERGE: FORWARD, DETERMINISTIC: BACKWARD}
# Sets of rings: of these the speed is taken on fewer ranks too, and of these it is not taken.
LENGTHS = "lengths"
MEMORY, ERROR, HOST, CHECKPOINT = "memory", "error", "host", "checkpoint"
DIRECTIONS = {"fwd": (FORWARD,), "bwd": (BACKWARD,), "both": (FORWARD, BACKWARD)}
MATMULS = {FORWARD: 4, BACKWARD: 10}  # FLOPs per visible pair, head and head_dim
HEAD_DIMS = (64, 128, 256)
K = 1024
MASK_TOKENS = 128 * K
RING_TOKENS = 256 * K  # of packed documents and windows over many ranks
SHARES = (4 * K, 16 * K, 64 * K)  # tokens of each rank, on any number of ranks


@dataclass(frozen=True)
class Case:
    """Attention over sequences of `lengths` tokens, every one under the same mask.

    packed   the sequences lie one behind the other, (t, h, d); else they are a batch (b, s, h, d)
    window   (left, right) keys around the diagonal, -1 for unlimited; causal is (-1, 0)
    beside   label of the case that this one, causal and of equal FLOPs, is a yardstick for
    keys     of each sequence of a batch; None: its tokens
    """

    set: str
    label: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: tuple[int, int]
    packed: bool = False
    beside: str | None = None
    keys: tuple[int, ...] | None = None

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.keys is None else self.keys

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def causal(self) -> bool:
        return self.window == CAUSAL

    @property
    def mask(self) -> str:
        """The mask in one word or two."""
        if self.window in (CAUSAL, FULL):
            return "causal" if self.causal else "full"
        return f"window {self.window[0]}"

    @property
    def cumulative(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head, from the spans of the plan."""
        rows, keys = (np.array(n, np.int64) for n in (self.lengths, self.key_lengths))
        tiling = plan_local(rows, keys, *self.window).forward(128)[0]
        return visible_pairs(tiling.spans)

    def flops(self, direction: str) -> int:
        """Exact FLOPs of the matrix products: 4 (forward) or 10 (backward) x pairs x d x heads."""
        return MATMULS[direction] * self.pairs * self.head_dim * self.heads


def visible_pairs(spans: Table) -> int:
    """(row, column) pairs inside the bands of `spans`, rows of no two overlapping."""
    total = 0
    for span in spans:
        rows = np.arange(int(span["q1"]) - int(span["q0"]), dtype=np.int64)
        keys = int(span["k1"]) - int(span["k0"])
        begin = np.maximum(0, rows + int(span["lo"]))
        end = np.minimum(keys, rows + int(span["hi"]) + 1)
        total += int(np.maximum(0, end - begin).sum())
    return total


def dense(
    group: str, batch: int, seqlen: int, heads: tuple[int, int], d: int, window: tuple[int, int]
) -> Case:
    label = f"{short(seqlen)} x {batch}" if batch > 1 else short(seqlen)
    return Case(group, label, (seqlen,) * batch, *heads, d, window)


def paper(shrink: int) -> Iterable[Case]:
    """FlashAttention-3's protocol: 16k tokens in all, hidden size 2048, full and causal."""
    for d in HEAD_DIMS:
        for window in (FULL, CAUSAL):
            for seqlen in (512, K, 2 * K, 4 * K, 8 * K, 16 * K):
                heads = 2048 // d
                yield dense("paper", 16 * K // seqlen, seqlen // shrink, (heads, heads), d, window)


def gqa(shrink: int) -> Iterable[Case]:
    """Long sequences, 32 query heads on 8 KV heads."""
    for window, longest in ((FULL, 32 * K), (CAUSAL, 128 * K)):
        seqlen = 8 * K
        while seqlen <= longest:
            batch = max(1, 16 * K // seqlen)
            yield dense("gqa", batch, seqlen // shrink, (32, 8), 128, window)
            seqlen *= 2


def mqa(shrink: int) -> Iterable[Case]:
    """So few KV heads that key tiles do not fill a GPU by themselves."""
    for window in (FULL, CAUSAL):
        for kv_heads in (2, 1):
            case = dense("mqa", 2, 8 * K // shrink, (32, kv_heads), 128, window)
            yield replace(case, label=f"{case.label}, {kv_heads} KV")


def hops(shrink: int) -> Iterable[Case]:
    """What a rank of a zigzag ring computes at a hop."""
    yield hop("hops", shrink)


def hop(group: str, shrink: int) -> Case:
    """All rows of a rank on half the keys of another."""
    rows, keys = 8 * K // shrink, 4 * K // shrink
    label = f"{short(rows)} on {short(keys)}"
    return Case(group, label, (rows,), 32, 8, 128, FULL, keys=(keys,))


def merge(shrink: int) -> Iterable[Case]:
    yield hop(MERGE, shrink)


def deterministic(shrink: int) -> Iterable[Case]:
    """Causal sequences of 8k, with as many KV heads as heads and with fewer."""
    for d, heads, kv_heads in ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8)):
        case = dense(DETERMINISTIC, 2, 8 * K // shrink, (heads, kv_heads), d, CAUSAL)
        yield replace(case, label=f"{case.label}, {heads}:{kv_heads}")


def masks(shrink: int) -> Iterable[Case]:
    """Packed documents and sliding windows, each followed by a causal sequence of equal FLOPs."""
    tokens, rng = MASK_TOKENS // shrink, random.Random(1)
    found = []
    for low, high in ((128, 16 * K), (K, 64 * K)):
        lengths = documents(rng, tokens, max(1, low // shrink), high // shrink)
        label = f"{len(lengths)} documents of {short(low // shrink)}-{short(high // shrink)}"
        found.append(Case("masks", label, lengths, 32, 8, 128, CAUSAL, packed=True))
    for left in (4 * K, K):
        window = (left // shrink, 0)
        label = f"window {left // shrink}"
        found.append(Case("masks", label, (tokens,), 32, 8, 128, window))
    for case in found:
        yield case
        yield causal_of_equal_flops(case)


def ablation(shrink: int) -> Iterable[Case]:
    """The shape of the paper's Table 2, which is measured in fp16."""
    yield dense(ABLATION, 4, 8448 // shrink, (16, 16), 128, FULL)


def documents(rng: random.Random, tokens: int, low: int, high: int) -> tuple[int, ...]:
    """Lengths that sum to `tokens`, log-uniform in [low, high), the last cut short."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(math.exp(rng.uniform(math.log(low), math.log(high))))
        lengths.append(min(left, length))
    return tuple(lengths)


def causal_of_equal_flops(case: Case) -> Case:
    """One causal sequence with as many pairs, s (s + 1) / 2, in whole 128 tokens where it can."""
    seqlen = math.isqrt(2 * case.pairs)
    seqlen = seqlen // 128 * 128 or seqlen
    return replace(
        case,
        label=f"causal {seqlen}",
        lengths=(seqlen,),
        window=CAUSAL,
        packed=False,
        beside=case.label,
    )


def short(tokens: int) -> str:
    """16384 as 16k."""
    return f"{tokens // K}k" if tokens >= K and tokens % K == 0 else str(tokens)


@dataclass(frozen=True)
class RingCase(Case):
    """A case whose tokens are spread over `world` ranks."""

    world: int = 1

    def flops(self, direction: str) -> int:
        """Of one rank, if all have the same."""
        return super().flops(direction) // self.world


def ring_case(
    group: str, label: str, lengths: tuple[int, ...], world: int, left: int = -1
) -> RingCase:
    return RingCase(group, label, lengths, 32, 8, 128, (left, 0), packed=True, world=world)


def lengths(world: int, shrink: int) -> Iterable[RingCase]:
    """One causal sequence: strong scaling by its length, weak scaling by its length per rank."""
    for tokens in (16 * K, 32 * K, 64 * K, 128 * K, 256 * K):
        yield ring_case(LENGTHS, short(tokens // shrink), (tokens // shrink,), world)


def packed(world: int, shrink: int) -> Iterable[RingCase]:
    """Documents of log-uniform lengths."""
    yield _documents("documents", RING_TOKENS // shrink, K // shrink, 64 * K // shrink, world)


def _documents(group: str, tokens: int, low: int, high: int, world: int) -> RingCase:
    found = documents(random.Random(1), tokens, max(1, low), high)
    label = f"{len(found)} documents of {short(low)}-{short(high)}"
    return ring_case(group, label, found, world)


def windowed(world: int, shrink: int) -> Iterable[RingCase]:
    """A sliding window over a long sequence."""
    left = 4 * K // shrink
    label = f"window {left} of {short(RING_TOKENS // shrink)}"
    yield ring_case("window", label, (RING_TOKENS // shrink,), world, left)


def shards(world: int, shrink: int) -> Iterable[RingCase]:
    """As many tokens a rank on any number of ranks, to be weighed."""
    for share in SHARES:
        tokens = share * world // shrink
        if world > 1:
            yield ring_case(MEMORY, f"{short(share // shrink)} a GPU", (tokens,), world)


def exact(world: int, shrink: int) -> Iterable[RingCase]:
    """So few tokens that the truth is known in float64 for all heads."""
    tokens = 8 * K // shrink
    if world > 1:
        yield ring_case(ERROR, short(tokens), (tokens,), world)
        yield _documents(ERROR, tokens, 64 // min(shrink, 16), 4 * K // shrink, world)


def quick(world: int, shrink: int) -> Iterable[RingCase]:
    """What a GPU computes sooner than its host has started it."""
    tokens = max(64, K // shrink)
    if world > 1:
        yield ring_case(HOST, f"{short(tokens)} a GPU", (tokens * world,), world)


def blocks(world: int, shrink: int) -> Iterable[RingCase]:
    """As many tokens a rank on any number of ranks, of a block that may be checkpointed."""
    for share in SHARES:
        tokens = share * world // shrink
        yield ring_case(CHECKPOINT, f"{short(share // shrink)} a GPU", (tokens,), world)


SETS = {
    "paper": paper,
    "gqa": gqa,
    "mqa": mqa,
    "hops": hops,
    "masks": masks,
    ABLATION: ablation,
    MERGE: merge,
    DETERMINISTIC: deterministic,
}
RING_SETS = {
    LENGTHS: lengths,
    "documents": packed,
    "window": windowed,
    MEMORY: shards,
    ERROR: exact,
    HOST: quick,
    CHECKPOINT: blocks,
}


def select(
    names: Iterable[str], head_dims: Iterable[int] = HEAD_DIMS, shrink: int = 1
) -> list[Case]:
    """The cases of sets, in order. `shrink` divides every length, for runs without a GPU."""
    wanted = set(head_dims)
    return [case for name in names for case in SETS[name](shrink) if case.head_dim in wanted]
