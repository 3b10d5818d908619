"""The cases of `python -m ringfa3.bench ring`, by set. `world` is the number of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from ringfa3.bench.cluster.mixes import DISTRIBUTIONS, Mix
from ringfa3.bench.common.cases import (
    FIRST_KEYS,
    TREES,
    Case,
    K,
    documents,
    of_spans,
    short,
    span_masks,
    without_spans,
)
from ringfa3.masks.mask import Mask

LENGTHS = "lengths"  # the only set of speed that also runs on fewer ranks
MEMORY, ERROR, HOST, CHECKPOINT, FRESH = "memory", "error", "host", "checkpoint", "fresh"
UNTIMED = (MEMORY, ERROR, HOST)
MAGI, MIXES = "magi", "mixes"
SEEDED = (MAGI, MIXES)  # batches of documents, a row for each
SPANS = "spans"  # masks; as SEEDED, its only peer is one GPU under the same mask
STEPS = (CHECKPOINT, FRESH)  # a row is a forward and a backward of RingFA3, under "backward"
RING_TOKENS = 256 * K  # of packed documents and windows
SHARD_TOKENS = (4 * K, 16 * K, 64 * K)  # of each rank
SEEDS = 4  # batches of a mix


@dataclass(frozen=True)
class RingCase(Case):
    """A case whose tokens are sharded over `world` ranks.

    mix  from which the documents are drawn; None: they are not
    """

    world: int = 1
    mix: Mix | None = None

    def flops(self, direction: str) -> int:
        """The mean over ranks."""
        return super().flops(direction) // self.world


def ring_case(
    set_name: str, label: str, lengths: tuple[int, ...], world: int, left: int = -1
) -> RingCase:
    return RingCase(set_name, label, lengths, 32, 8, 128, (left, 0), packed=True, world=world)


def one_sequence(world: int, shrink: int) -> Iterable[RingCase]:
    """One causal sequence of a growing number of tokens."""
    for tokens in (16 * K, 32 * K, 64 * K, 128 * K, 256 * K):
        yield ring_case(LENGTHS, short(tokens // shrink), (tokens // shrink,), world)


def packed_documents(world: int, shrink: int) -> Iterable[RingCase]:
    """Documents of log-uniform lengths."""
    yield _documents("documents", RING_TOKENS // shrink, K // shrink, 64 * K // shrink, world)


def _documents(set_name: str, tokens: int, low: int, high: int, world: int) -> RingCase:
    lengths = documents(random.Random(1), tokens, max(1, low), high)
    label = f"{len(lengths)} documents of {short(low)}-{short(high)}"
    return ring_case(set_name, label, lengths, world)


def sliding_window(world: int, shrink: int) -> Iterable[RingCase]:
    """A sliding window over a long sequence."""
    left = 4 * K // shrink
    label = f"window {left} of {short(RING_TOKENS // shrink)}"
    yield ring_case("window", label, (RING_TOKENS // shrink,), world, left)


def memory(world: int, shrink: int) -> Iterable[RingCase]:
    """Shards of a fixed length on any number of ranks."""
    for shard in SHARD_TOKENS:
        if world > 1:
            label = f"{short(shard // shrink)} a GPU"
            yield ring_case(MEMORY, label, (shard * world // shrink,), world)


def error(world: int, shrink: int) -> Iterable[RingCase]:
    """Short enough for a float64 reference of every head."""
    tokens = 8 * K // shrink
    if world > 1:
        yield ring_case(ERROR, short(tokens), (tokens,), world)
        yield _documents(ERROR, tokens, 64 // min(shrink, 16), 4 * K // shrink, world)


def host_time(world: int, shrink: int) -> Iterable[RingCase]:
    """Short enough that the GPU finishes a call sooner than the host starts it."""
    tokens = max(64, K // shrink)
    if world > 1:
        yield ring_case(HOST, f"{short(tokens)} a GPU", (tokens * world,), world)


def checkpointed_block(world: int, shrink: int) -> Iterable[RingCase]:
    """Shards of a fixed length for a transformer block under activation checkpointing."""
    for shard in SHARD_TOKENS:
        label = f"{short(shard // shrink)} a GPU"
        yield ring_case(CHECKPOINT, label, (shard * world // shrink,), world)


def fresh_packings(world: int, shrink: int) -> Iterable[RingCase]:
    """Shards of a fixed length. Their documents change from step to step, see `packing`."""
    for shard in SHARD_TOKENS:
        label = f"{short(shard // shrink)} a GPU"
        case = ring_case(FRESH, label, (shard * world // shrink,), world)
        yield replace(case, lengths=packing(case, "first"))
    first, *_ = magi(world, shrink)
    yield replace(first, set=FRESH, label=first.label.rpartition(", ")[0])


def packing(case: RingCase, seed: str) -> tuple[int, ...]:
    """Lengths of another batch: of the case's mix, or log-uniform up to a quarter of the tokens."""
    rng, tokens = random.Random(seed), case.tokens
    if case.mix is not None:
        return tuple(case.mix.draw(rng.getrandbits(32), case.world).tolist())
    return documents(rng, tokens, min(64, max(1, tokens // 8)), max(2, tokens // 4))


def magi(world: int, shrink: int) -> Iterable[RingCase]:
    """MagiAttention's benchmark: 64:8 heads, its lengths, up to a quarter of the tokens."""
    for case in _batches(MAGI, "magi", 8 * K // shrink, world):
        yield replace(case, heads=64)


def mixes(world: int, shrink: int) -> Iterable[RingCase]:
    """Batches of short documents, and of a long tail."""
    for tokens in (4 * K, 8 * K, 32 * K):
        for name in ("short", "tail"):
            yield from _batches(MIXES, name, tokens // shrink, world)


def _batches(set_name: str, name: str, tokens: int, world: int) -> Iterable[RingCase]:
    """Cases of a mix of `tokens` a GPU."""
    mix = Mix(name, DISTRIBUTIONS[name], tokens)
    for seed in range(SEEDS):
        lengths = tuple(mix.draw(seed, world).tolist())
        label = f"{name}, {short(tokens)} a GPU, seed {seed}"
        yield replace(ring_case(set_name, label, lengths, world), mix=mix)


def spans(world: int, shrink: int) -> Iterable[RingCase]:
    """Trees, one of them as long as 8; a window with first keys and without them, whose K/V rows
    are compared."""
    masks = span_masks(shrink)
    one = Mask.tree([32 * K // shrink, *[8 * K // shrink] * 16], [-1] + [0] * 16)
    masks = {TREES: masks[TREES], "tree of 32k + 16 x 8k": one, FIRST_KEYS: masks[FIRST_KEYS]}
    for label, given in masks.items():
        case = of_spans(SPANS, label, given)
        values = {f.name: getattr(case, f.name) for f in fields(Case)}
        yield (last := RingCase(**values, world=world))
    window = without_spans(last).window
    yield replace(last, spans=None, window=window, label=f"{FIRST_KEYS}, without these")


RING_SETS = {
    LENGTHS: one_sequence,
    "documents": packed_documents,
    "window": sliding_window,
    MEMORY: memory,
    ERROR: error,
    HOST: host_time,
    CHECKPOINT: checkpointed_block,
    FRESH: fresh_packings,
    MAGI: magi,
    MIXES: mixes,
    SPANS: spans,
}
