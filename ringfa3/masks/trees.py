"""Sequences with common prefixes as one tree: `fold` computes each shared token once.

For reinforcement learning (many responses to one prompt) and for branches of agents. A row of the
folded batch has one label. So where sequences part, the last token that they share is not in the
shared node: each branch begins with a copy of it, at the same position. The copy attends to what
the token attends to, and is what the branch attends to. Hence the loss and all gradients are those
of the sequences one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.masks.arguments import integers
from ringfa3.masks.mask import Mask
from ringfa3.masks.spans import Ints
from ringfa3.validation import shown, whole_number

IGNORED = -100  # the label of `torch.nn.functional.cross_entropy` that has no loss
_NUMBER = np.dtype(">i8")  # its bytes sort as the numbers do, from 0 on


@dataclass(frozen=True, eq=False)
class Folded:
    """A batch of sequences as one packed tree. Tensors are on the CPU.

    tokens     (t,) int64
    positions  (t,) int64, of a token in its sequences
    labels     (t,) int64: the next token, -100 after the last one
    weights    (t,) float64: the sum of the sequences' weights of the label
    mask       of the t tokens; for `plan_context` or `flash_attn_mask_func`
    rows       of each sequence: (its tokens,) int64, where each of them is in the batch

    The sum of weights * cross entropy(logits, labels) over all rows is the sum of the weighted
    losses of all sequences. `plan.shard` cuts all tensors; labels are shifted already.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    mask: Mask
    rows: list[torch.Tensor]


@dataclass
class _Node:
    """Tokens [begin, end) of a sequence, and of all others that go through the node."""

    parent: int
    sequence: int
    begin: int
    end: int


def fold(
    sequences: Sequence[Sequence[int] | npt.NDArray[np.integer] | torch.Tensor],
    weights: Sequence[Sequence[float] | npt.NDArray[np.floating] | torch.Tensor] | None = None,
    min_shared: int = 1,
) -> Folded:
    """Folds sequences of tokens into trees, one for each first token.

    Args:
        sequences: whole numbers >= 0, on the CPU, at least one a sequence. In any order; equal ones
            are computed once.
        weights: of each sequence, for each token, the weight of its loss as a label: 0 for a
            prompt's, the advantage for a response's. That of the first token has no use. Default 1.
        min_shared: sequences part earlier if they share fewer tokens than that after the last
            branch. Short nodes cost more than they save; 128 tokens are a tile of the kernels.

    Raises:
        ValueError, TypeError: a sequence is empty or has other values, weights do not fit, or
            min_shared is less than 1 or no whole number.
    """
    if whole_number("min_shared", min_shared) < 1:
        raise ValueError(f"min_shared={min_shared}: it must be at least 1")
    numbers = [_numbers(i, sequence) for i, sequence in enumerate(sequences)]
    factors = [np.ones(len(x)) for x in numbers] if weights is None else _factors(numbers, weights)
    keys = [x.astype(_NUMBER).tobytes() for x in numbers]
    order = sorted(range(len(numbers)), key=keys.__getitem__)
    nodes, leaves = _tree([numbers[i] for i in order], min_shared)
    for node in nodes:
        node.sequence = order[node.sequence]
    lengths = np.array([node.end - node.begin for node in nodes], np.int64)
    first = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    tokens, labels = np.zeros(total, np.int64), np.full(total, IGNORED, np.int64)
    for row, node in zip(first.tolist(), nodes, strict=True):
        source = numbers[node.sequence]
        tokens[row : row + node.end - node.begin] = source[node.begin : node.end]
        after = source[node.begin + 1 : node.end + 1]
        labels[row : row + len(after)] = after
    mask = Mask.tree(lengths.tolist(), [node.parent for node in nodes])
    sums, rows = np.zeros(total), [np.zeros(0, np.int64)] * len(numbers)
    for leaf, i in zip(leaves, order, strict=True):
        rows[i] = _path(nodes, first, leaf, len(numbers[i]))
        sums[rows[i][:-1]] += factors[i][1:]
    return Folded(
        torch.from_numpy(tokens),
        torch.from_numpy(mask.positions.copy()),
        torch.from_numpy(labels),
        torch.from_numpy(sums),
        mask,
        [torch.from_numpy(x) for x in rows],
    )


def _numbers(number: int, sequence: npt.ArrayLike) -> Ints:
    tokens = integers(f"sequences[{number}]", sequence, (-1,))
    if len(tokens) == 0:
        raise ValueError(f"sequences[{number}] has no tokens: give at least 1")
    if tokens.min() < 0:
        raise ValueError(f"sequences[{number}] has the token {tokens.min()}: give tokens >= 0")
    return tokens


def _factors(numbers: list[Ints], weights: Sequence[object]) -> list[npt.NDArray[np.float64]]:
    if not isinstance(weights, Sequence):
        raise TypeError(f"weights={shown(weights)}: give a list, with the weights of each sequence")
    if len(weights) != len(numbers):
        raise ValueError(f"weights has {len(weights)} sequences, there are {len(numbers)}")
    factors = [_floats(f"weights[{i}]", x) for i, x in enumerate(weights)]
    for i, (x, y) in enumerate(zip(numbers, factors, strict=True)):
        if x.shape != y.shape:
            raise ValueError(
                f"weights[{i}] has shape {y.shape}, its sequence {x.shape}: give one weight a token"
            )
    return factors


def _floats(name: str, values: Any) -> npt.NDArray[np.float64]:
    try:
        if isinstance(values, torch.Tensor):
            values = values.to("cpu", torch.float64).numpy()  # numpy has no bfloat16
        return np.asarray(values, np.float64)
    except (TypeError, ValueError, RuntimeError) as problem:  # RuntimeError: it needs a gradient
        raise TypeError(
            f"{name}={shown(values)}: give real numbers; a tensor of them needs detach()"
        ) from problem


def _tree(sequences: list[Ints], min_shared: int) -> tuple[list[_Node], list[int]]:
    """(nodes in depth-first order, the node where each sequence ends) of sorted sequences."""
    shared = [0, *(_common(a, b) for a, b in itertools.pairwise(sequences))]
    nodes: list[_Node] = []
    ends = [-1] * len(sequences)
    # (sequences [a, b), tokens that they are known to share, parent, tokens of the parent's path)
    stack = [(0, len(sequences), 0, -1, 0)]
    while stack:
        a, b, known, parent, depth = stack.pop()
        if a == b:
            continue
        # The last run whose members share more than `known`; what is before it stays for later,
        # above it on the stack, because nodes are in the order of the sequences.
        split = next((i for i in range(a + 1, b) if shared[i] <= known), b)
        stack.append((split, b, known, parent, depth))
        common = min((shared[i] for i in range(a + 1, split)), default=len(sequences[a]))
        # A branch begins with a copy of the last token of its parent's path.
        begin = max(depth - 1, 0)
        if len(sequences[split - 1]) == common:  # they are equal
            nodes.append(_Node(parent, a, begin, common))
            ends[a:split] = [len(nodes) - 1] * (split - a)
        elif common - depth < min_shared:
            stack.append((a, split, common, parent, depth))
        else:
            if common - 1 > begin:  # nothing before the copy of the first token
                nodes.append(_Node(parent, a, begin, common - 1))
                parent = len(nodes) - 1
            done = next(i for i in range(a, split) if len(sequences[i]) > common)
            ends[a:done] = [len(nodes)] * (done - a)  # the copy, in the first branch
            stack.append((done, split, common, parent, common))
    return nodes, ends


def _common(a: Ints, b: Ints) -> int:
    """Number of tokens with which both begin."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(np.argmax(differ)) if differ.any() else size


def _path(nodes: list[_Node], first: Ints, leaf: int, tokens: int) -> Ints:
    """(tokens,) rows of the batch from a root to a node."""
    parts = []
    while leaf >= 0:
        node = nodes[leaf]
        parts.append(np.arange(first[leaf], first[leaf] + node.end - node.begin))
        leaf = node.parent
    return np.concatenate(parts[::-1])[:tokens]
