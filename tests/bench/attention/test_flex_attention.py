"""If this fails, FlexAttention and FlashAttention-4 are timed under another mask than RingFA3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from ringfa3 import Mask
from ringfa3.bench.attention.cases import TREE
from ringfa3.bench.attention.flex_attention import BLOCK, FlexAttention, RunsOfKeys
from ringfa3.bench.common.cases import FORWARD, of_spans
from ringfa3.bench.common.problem import UnsupportedCaseError, make_problem
from tests.support.dense import attention, worst

CPU = torch.device("cpu")
TREES = Mask.pack([Mask.tree([200, 70, 130], [-1, 0, 0]), Mask.tree([128, 300], [-1, 0])])


@pytest.mark.parametrize(
    "mask",
    [
        TREES,
        Mask.documents(600).with_bidirectional([40, 300], [170, 301]),
        Mask.documents(700, window_size=(300, 0), first_keys=4),
        Mask.documents([0, 256, 512], causal=False),
    ],
    ids=["trees", "images", "first keys", "documents"],
)
def test_runs_and_blocks_are_those_of_the_mask(mask: Mask) -> None:
    """Exactly. References: the dense mask, and PyTorch's `create_block_mask` of it."""
    tokens, runs = mask.q_tokens, RunsOfKeys.of(of_spans(TREE, "any", mask), CPU)
    index, dense = torch.arange(tokens), torch.from_numpy(mask.dense())
    assert torch.equal(runs.mask_mod(index, index, index[:, None], index), dense)
    found = runs.block_mask()
    expected = create_block_mask(
        lambda b, h, row, key: dense[row, key], None, None, tokens, tokens, "cpu", BLOCK
    )
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.to_dense(), expected.to_dense())


def test_it_attends_under_the_mask() -> None:
    """Reference: dense attention in float64, to 1e-12."""
    case = replace(of_spans(TREE, "any", TREES), heads=4, kv_heads=2)
    problem = make_problem(case, FORWARD, torch.float64, CPU)
    (out,) = FlexAttention().prepare(problem).results().values()
    expected, _ = attention(problem.q, problem.k, problem.v, torch.from_numpy(TREES.dense()))
    assert worst([(out, expected)]) < 1e-12


def test_rows_of_many_runs_are_refused() -> None:
    blocks = Mask.blocks([0, 1, 2, 2, 2], [0, 1, 0, 2, 4], 10, 50)
    with pytest.raises(UnsupportedCaseError, match="rows of 3 runs of keys, 2 are compared"):
        RunsOfKeys.of(of_spans(TREE, "any", blocks), CPU)
