"""The cases of `python -m ringfa3.bench attention`, by set."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from ringfa3.bench.common.cases import (
    BACKWARD,
    CAUSAL,
    FORWARD,
    FULL,
    TREES,
    Case,
    K,
    causal_of_equal_flops,
    documents,
    of_spans,
    short,
    span_masks,
)
from ringfa3.bench.common.scores import TIMED, UNTIMED
from ringfa3.masks.mask import Mask

# Sets with implementations of their own, and the direction of each; None: both. They run one at a
# time.
ABLATION = "ablation"  # against the kernel without some of its optimisations
DETERMINISTIC = "deterministic"  # with deterministic=True and without
FP8, INT8 = "fp8", "int8"  # with 8-bit operands and without
# The same in the backward: the precision of each set.
QUANTISED_BACKWARD = {"fp8-backward": FP8, "int8-backward": INT8}
BELOW = "below"  # head dims below a kernel's own, and with columns of zeros up to it
SINKS = "sinks"  # with a sink and without
SPANS = "spans"  # masks, and a sequence of equal FLOPs or a window without them
MLA = "mla"  # head dim 192 of Q and K, 128 of V
TREE = "tree"  # trees, against their sequences one by one and libraries that take such masks
OWN_IMPLEMENTATIONS: dict[str, str | None] = {
    ABLATION: FORWARD,
    DETERMINISTIC: BACKWARD,
    FP8: FORWARD,
    INT8: FORWARD,
    **dict.fromkeys(QUANTISED_BACKWARD, BACKWARD),
    BELOW: None,
    SINKS: None,
    SPANS: None,
    MLA: None,
    TREE: None,
}
SCORES, PACKED = "scores", "packed"
HOST = "host"  # its rows are times of the host; it runs alone, too
HEAD_DIMS = (64, 128, 256)
PEERS = ("fa3", "fa4", "cudnn")  # the other libraries, as options name them
MASK_TOKENS = 128 * K


def dense(
    set_name: str, batch: int, seqlen: int, heads: tuple[int, int], d: int, window: tuple[int, int]
) -> Case:
    """A batch of equal sequences; `heads` are (query heads, KV heads)."""
    label = f"{short(seqlen)} x {batch}" if batch > 1 else short(seqlen)
    return Case(set_name, label, (seqlen,) * batch, *heads, d, window)


def paper(shrink: int) -> Iterable[Case]:
    """FlashAttention-3's protocol: 16k tokens in all, hidden size 2048, full and causal."""
    for d in HEAD_DIMS:
        for window in (FULL, CAUSAL):
            for seqlen in (512, K, 2 * K, 4 * K, 8 * K, 16 * K):
                heads = 2048 // d
                yield dense("paper", 16 * K // seqlen, seqlen // shrink, (heads, heads), d, window)


def gqa(shrink: int) -> Iterable[Case]:
    """Long sequences, 32 query heads on 8 KV heads."""
    for window in (FULL, CAUSAL):
        for seqlen in (8 * K, 16 * K, 32 * K, 64 * K, 128 * K):
            batch = max(1, 16 * K // seqlen)
            yield dense("gqa", batch, seqlen // shrink, (32, 8), 128, window)


def mqa(shrink: int) -> Iterable[Case]:
    """2 and 1 KV heads: fewer backward tiles than SMs unless the work split cuts them."""
    for window in (FULL, CAUSAL):
        for kv_heads in (2, 1):
            case = dense("mqa", 2, 8 * K // shrink, (32, kv_heads), 128, window)
            yield replace(case, label=f"{case.label}, {kv_heads} KV")


def hops(shrink: int) -> Iterable[Case]:
    """A hop of a zigzag ring: all rows of a rank on half the keys of another."""
    rows, keys = 8 * K // shrink, 4 * K // shrink
    label = f"{short(rows)} on {short(keys)}"
    yield Case("hops", label, (rows,), 32, 8, 128, FULL, keys=(keys,))


def deterministic(shrink: int) -> Iterable[Case]:
    """Causal sequences of 8k, MHA and GQA."""
    for d, heads, kv_heads in ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8)):
        case = dense(DETERMINISTIC, 2, 8 * K // shrink, (heads, kv_heads), d, CAUSAL)
        yield replace(case, label=f"{case.label}, {heads}:{kv_heads}")


def masks(shrink: int) -> Iterable[Case]:
    """Packed documents and sliding windows, each followed by a causal sequence of equal FLOPs."""
    for case in (*_documents(shrink), *_windows(shrink)):
        yield case
        yield causal_of_equal_flops(case)


def _documents(shrink: int) -> list[Case]:
    """Packed documents of 128 to 16k and of 1k to 64k tokens."""
    rng, cases = random.Random(1), []
    for low, high in ((128, 16 * K), (K, 64 * K)):
        lengths = documents(rng, MASK_TOKENS // shrink, max(1, low // shrink), high // shrink)
        label = f"{len(lengths)} documents of {short(low // shrink)}-{short(high // shrink)}"
        cases.append(Case("masks", label, lengths, 32, 8, 128, CAUSAL, packed=True))
    return cases


def _windows(shrink: int) -> list[Case]:
    """Sliding windows of 4k and of 1k tokens."""
    cases = []
    for left in (4 * K, K):
        window = (left // shrink, 0)
        label = f"window {left // shrink}"
        cases.append(Case("masks", label, (MASK_TOKENS // shrink,), 32, 8, 128, window))
    return cases


def packed(shrink: int) -> Iterable[Case]:
    """Short documents, 16k tokens in all, hidden size 2048, causal."""
    tokens, rng = 16 * K // shrink, random.Random(1)
    by_label: dict[str, tuple[int, ...]] = {}
    for n in (64, 128, 256, 512):
        length = max(1, n // shrink)
        by_label[f"{16 * K // n} x {n}"] = (length,) * (tokens // length)
    mixed: list[int] = []
    while (left := tokens - sum(mixed)) > 0:
        mixed.append(min(left, max(1, rng.randint(37, 500) // shrink)))
    by_label["37 to 500"] = tuple(mixed)
    for d in HEAD_DIMS:
        for label, lengths in by_label.items():
            yield Case(PACKED, label, lengths, 2048 // d, 2048 // d, d, CAUSAL, packed=True)


def scores(shrink: int) -> Iterable[Case]:
    """One sequence of 16k with each distribution of scores, 4k where only errors are measured."""
    shapes = [(2048 // d, d, window) for d in HEAD_DIMS for window in (FULL, CAUSAL)]
    for heads, d, window in shapes:
        for name in TIMED:
            case = dense(SCORES, 1, 16 * K // shrink, (heads, heads), d, window)
            yield replace(case, label=name, scores=name)
    for window in (FULL, CAUSAL):
        case = dense(SCORES, 1, 64 * K // shrink, (32, 8), 128, window)
        yield replace(case, label=f"sigma 4, {case.label}", scores="sigma 4")
    for heads, d, window in shapes:
        for name in UNTIMED:
            case = dense(SCORES, 1, 4 * K // shrink, (heads, heads), d, window)
            yield replace(case, label=name, scores=name)


def host_time(shrink: int) -> Iterable[Case]:
    """Short enough that the GPU finishes a call sooner than the host starts it."""
    tokens = 512 // shrink
    for d in HEAD_DIMS:
        for label, window in (("causal", CAUSAL), ("window", (max(1, tokens // 4), 0))):
            case = dense(HOST, 1, tokens, (8, 8), d, window)
            yield replace(case, label=f"{case.label}, {label}")
        lengths = (tokens // 2, tokens - tokens // 2)
        label = f"2 documents of {short(tokens // 2)}"
        yield Case(HOST, label, lengths, 8, 8, d, CAUSAL, packed=True)


def ablation(shrink: int) -> Iterable[Case]:
    """The shape of FlashAttention-3's Table 2, which the paper measured in fp16."""
    yield dense(ABLATION, 4, 8448 // shrink, (16, 16), 128, FULL)


def below(shrink: int) -> Iterable[Case]:
    """Sequences of 8k at head dims between those of the kernels, MHA and GQA, full and causal."""
    for d, heads in ((40, (32, 32)), (80, (16, 16)), (96, (16, 16)), (96, (32, 8)), (192, (8, 8))):
        for window in (FULL, CAUSAL):
            case = dense(BELOW, 2, 8 * K // shrink, heads, d, window)
            yield replace(case, label=f"{case.label}, {heads[0]}:{heads[1]}")


def mla(shrink: int) -> Iterable[Case]:
    """16k tokens in sequences of 4k and 16k, 16 heads, full and causal."""
    for window in (FULL, CAUSAL):
        for seqlen in (4 * K, 16 * K):
            case = dense(MLA, 16 * K // seqlen, seqlen // shrink, (16, 16), 192, window)
            yield replace(case, label=f"{case.label}, V of 128", v_dim=128)


def sinks(shrink: int) -> Iterable[Case]:
    """One sequence of 8k, 64 query heads on 8 KV heads, with a window of 128 and causal."""
    windows = ("window 128", (max(1, 128 // shrink), 0)), ("causal", CAUSAL)
    for label, window in windows:
        case = dense(SINKS, 1, 8 * K // shrink, (64, 8), 64, window)
        yield replace(case, label=f"{case.label}, {label}")


def spans(shrink: int) -> Iterable[Case]:
    """Images in a causal sequence, trees, a window with first keys, random blocks."""
    masks = {**span_masks(shrink), "causal as a mask": Mask.documents(64 * K // shrink)}
    for label, mask in masks.items():
        yield of_spans(SPANS, label, mask)


def tree(shrink: int) -> Iterable[Case]:
    """The trees of `spans`."""
    yield of_spans(TREE, TREES, span_masks(shrink)[TREES])


def quantised(set_name: str, shrink: int) -> Iterable[Case]:
    """16k tokens, hidden size 2048, scores of 1 and 4 nats; documents of 1k to 64k and a window of
    4k, each followed by a causal sequence of equal FLOPs."""
    for d in HEAD_DIMS:
        for window in (FULL, CAUSAL):
            for name in (None, "sigma 4"):
                case = dense(set_name, 1, 16 * K // shrink, (2048 // d, 2048 // d), d, window)
                yield replace(case, label=name or case.label, scores=name)
    for case in (*_documents(shrink)[1:], *_windows(shrink)[:1]):
        yield replace(case, set=set_name)
        yield replace(causal_of_equal_flops(case), set=set_name)


def quantised_backward(set_name: str, shrink: int) -> Iterable[Case]:
    """16k tokens, MHA and GQA; 64k of the latter."""
    shapes = (
        (16 * K, (32, 32), 64, CAUSAL),
        (16 * K, (32, 8), 64, CAUSAL),
        (16 * K, (16, 16), 128, CAUSAL),
        (16 * K, (16, 16), 128, FULL),
        (16 * K, (16, 4), 128, CAUSAL),
        (64 * K, (16, 4), 128, CAUSAL),
        (16 * K, (8, 8), 256, CAUSAL),
    )
    for seqlen, heads, d, window in shapes:
        case = dense(set_name, 1, seqlen // shrink, heads, d, window)
        yield replace(case, label=f"{case.label}, {heads[0]}:{heads[1]}")


SETS: dict[str, Callable[[int], Iterable[Case]]] = {
    "paper": paper,
    "gqa": gqa,
    "mqa": mqa,
    "hops": hops,
    "masks": masks,
    PACKED: packed,
    SCORES: scores,
    HOST: host_time,
    ABLATION: ablation,
    DETERMINISTIC: deterministic,
    FP8: partial(quantised, FP8),
    INT8: partial(quantised, INT8),
    **{name: partial(quantised_backward, name) for name in QUANTISED_BACKWARD},
    BELOW: below,
    SINKS: sinks,
    SPANS: spans,
    MLA: mla,
    TREE: tree,
}


def select(
    names: Iterable[str], head_dims: Iterable[int] = HEAD_DIMS, shrink: int = 1
) -> list[Case]:
    """The cases of the named sets, in order. `shrink` divides every length, for CPU runs.

    head_dims: of the kernels that run them.
    """
    wanted = set(head_dims)
    cases = (case for name in names for case in SETS[name](shrink))
    return [case for case in cases if kernel_head_dim(case.head_dim) in wanted]


def kernel_head_dim(head_dim: int) -> int:
    """The head dim of the kernel that runs a case."""
    return next(d for d in HEAD_DIMS if d >= head_dim)
