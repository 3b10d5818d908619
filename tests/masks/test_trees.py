"""If this fails, training on folded sequences differs from the sequences one by one. Folded
sequences: every token once, the same loss and gradients as one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ringfa3 import Mask, flash_attn_mask_func
from ringfa3.masks.trees import IGNORED, fold

VOCABULARY, DIM, HEADS = 7, 16, 2
NO_NUMBERS = ("a", None, 1.5, True)


class Model(nn.Module):
    """Two layers of attention and MLP, and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM)
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM, bias=False) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(-3)
            out = flash_attn_mask_func(q, k, v, mask)
            x = x + out.flatten(-2)  # type: ignore[union-attr]
            x = x + mlp(x).tanh()
        logits: Tensor = self.head(x)
        return logits


def loss_of(model: Model, batch: tuple[Tensor, Tensor, Tensor, Tensor, Mask]) -> Tensor:
    tokens, positions, labels, weights, mask = batch
    losses = F.cross_entropy(model(tokens, positions, mask), labels, reduction="none")
    return (losses * weights.to(losses.dtype)).sum()


def unfolded(
    sequences: list[list[int]], weights: list[list[float]]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Mask]:
    """The sequences one after the other."""
    labels = [x for s in sequences for x in (*s[1:], IGNORED)]
    factors: Any = [x for w in weights for x in (*w[1:], 0.0)]
    mask = Mask.documents(np.cumsum([0] + [len(s) for s in sequences]).tolist())
    tokens = torch.tensor([x for s in sequences for x in s])
    factors = torch.tensor(factors, dtype=torch.float64)
    return tokens, torch.tensor(mask.positions), torch.tensor(labels), factors, mask


def grpo(rng: random.Random) -> tuple[list[list[int]], list[list[float]]]:
    """Three prompts, responses with advantages, some empty, some that agree for a while."""
    sequences, weights = [], []
    for length in (9, 1, 14):
        prompt = rng.choices(range(VOCABULARY), k=length)
        for _ in range(4):
            response = rng.choices(range(3), k=rng.choice([0, 1, 5, 12]))
            advantage = rng.gauss(0, 1)
            sequences.append(prompt + response)
            weights.append([0.0] * length + [advantage] * len(response))
    return sequences, weights


@pytest.mark.parametrize("min_shared", [1, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradients_are_those_of_the_sequences(
    dtype: torch.dtype, bound: float, min_shared: int
) -> None:
    """Reference: the sequences as documents. Bounds are relative to 1 and the largest element."""
    sequences, weights = grpo(random.Random(min_shared))
    folded = fold(sequences, weights, min_shared)
    assert len(folded.tokens) < sum(map(len, sequences))
    batch = folded.tokens, folded.positions, folded.labels, folded.weights, folded.mask
    results = []
    for given_batch in (batch, unfolded(sequences, weights)):
        model = Model().to(dtype)
        loss = loss_of(model, given_batch)
        loss.backward()  # type: ignore[no-untyped-call]
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for found, expected in zip(*results, strict=True):
        scale = max(1.0, float(expected.abs().max()))
        assert float((found - expected).abs().max()) <= bound * scale


sequences_ = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8)


@settings(max_examples=100)
@given(sequences=sequences_, min_shared=st.integers(1, 4))
def test_rows_of_a_sequence_hold_its_tokens_and_see_each_other_causally(
    sequences: list[list[int]], min_shared: int
) -> None:
    """Reference: the sequence itself: tokens, positions, labels, and the mask among its rows. A
    row sees nothing else, and weights are those of all sequences."""
    folded = fold(sequences, min_shared=min_shared)
    allowed = folded.mask.dense()
    count = np.zeros(len(folded.tokens))
    for sequence, index in zip(sequences, folded.rows, strict=True):
        rows = index.numpy()
        assert folded.tokens[index].tolist() == sequence
        assert folded.positions[index].tolist() == list(range(len(sequence)))
        assert folded.labels[index][:-1].tolist() == sequence[1:]
        np.testing.assert_array_equal(allowed[np.ix_(rows, rows)], np.tri(len(rows), dtype=bool))
        assert (allowed[rows].sum(1) == np.arange(1, len(rows) + 1)).all()
        count[rows[:-1]] += 1
    assert folded.weights.tolist() == count.tolist()
    assert (folded.labels.numpy()[count > 0] >= 0).all()


def test_sequences_share_what_is_equal() -> None:
    """A prompt of 6 tokens, three responses: the prompt without its last token, and each response
    with a copy of it. Two responses agree in one token: they part there, or at the prompt."""
    prompt = [3, 1, 4, 1, 5, 9]
    sequences = [[*prompt, 2, 6], [*prompt, 2, 7, 1], [*prompt, 8]]
    assert len(fold(sequences).tokens) == 5 + 1 + 2 + 3 + 2
    assert len(fold(sequences, min_shared=2).tokens) == 5 + 3 + 4 + 2
    assert len(fold(sequences, min_shared=9).tokens) == 8 + 9 + 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1], []],), r"sequences\[1\] has no tokens"),
        (([[1.5]],), r"sequences\[0\]=\[1.5\]: give whole numbers"),
        (([[1], 5],), r"sequences\[1\]=5: give whole numbers"),
        (([[[1, 2]]],), r"sequences\[0\] has shape \(1, 2\)"),
        (([[1, -2]],), r"sequences\[0\] has the token -2"),
        (([[1, 2]], [[1.0]]), r"weights\[0\] has shape \(1,\)"),
        (([[1, 2]], 3), "weights=3: give a list"),
        (([[1, 2]], [["a", 1]]), r"weights\[0\]=\['a', 1\]: give real numbers"),
        (([[1, 2]], [torch.ones(2, requires_grad=True)]), r"weights\[0\]=.*: give real numbers"),
        (([[1, 2]], []), "weights has 0 sequences, there are 1"),
        *[(([[1, 2]], None, x), f"min_shared={x!r}: give a whole number") for x in NO_NUMBERS],
        *[(([[1, 2]], None, x), f"min_shared={x}: it must be at least 1") for x in (0, -3)],
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fold(*arguments)  # type: ignore[arg-type]


def test_weights_may_have_a_dtype_that_numpy_has_not() -> None:
    """Reference: the numbers themselves, exactly; bfloat16 holds them."""
    weights = [torch.tensor([0, 0.5, -1.25], dtype=torch.bfloat16)]
    assert fold([[1, 2, 3]], weights).weights.tolist() == [0.5, -1.25, 0]
