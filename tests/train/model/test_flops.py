"""If this fails, MFU is wrong. FLOPs of a step, against what a model really multiplies and against
a dense mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.model.test_transformer import packed_sample
from train.config import MemoryConfig, ModelConfig
from train.data.batches import make_batch
from train.model.flops import StepFlops, step_flops
from train.model.transformer import LanguageModel, Transformer
from train.model.window import allowed_pairs, widest

MODEL = ModelConfig(n_layers=3, n_heads=4, n_kv_heads=2, dim=24, head_dim=8, ffn_dim=40)
ROWS, LENGTHS = 50, [31, 1, 64]


class Products(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, and counts calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.forwards, self.backwards = 0, 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, shapes = op.name(), [a.shape for a in args if isinstance(a, torch.Tensor)]
        if name == "ringfa3::linear":
            self.flops += 2 * shapes[0].numel() * shapes[1][0]
        elif name == "ringfa3::linear_backward":  # dx and dweight
            self.flops += 2 * 2 * shapes[1].numel() * shapes[2][0]
        elif name == "ringfa3::matmul":
            self.flops += 2 * shapes[0].numel() * shapes[1][1]
        elif name == "ringfa3::add_matmul":  # the first is the sum
            self.flops += 2 * shapes[1].numel() * shapes[2][1]
        self.forwards += name == "ringfa3::ring_attention"
        self.backwards += name == "ringfa3::ring_attention_backward"
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [None, 20])
@pytest.mark.parametrize(
    ("recompute", "layers"),
    [
        *(("none", None), ("full", None), ("full", 2)),
        *(("attention-saving", None), ("attention-saving", 1)),
    ],
)
def test_counts_are_what_a_step_multiplies(recompute, layers, chunk):
    """Every product of forward and backward, equal to the last FLOP."""
    memory = MemoryConfig(recompute, chunk, loss_chunk=30, recompute_layers=layers)
    model = LanguageModel(Transformer(MODEL, ROWS, 0, memory), torch.float32, memory.loss_chunk)
    batch = make_batch(packed_sample(LENGTHS, ROWS), None, "zigzag")
    with Products() as seen:
        model(batch).sum().backward()
    pairs = allowed_pairs(MODEL, batch.plan)
    expected = step_flops(MODEL, memory, ROWS, sum(LENGTHS), pairs)
    assert seen.flops == expected.linear + expected.repeated_linear
    forward = 4 * batch.plan.work_per_rank[0] * MODEL.n_heads * 8  # of a layer
    assert seen.backwards == MODEL.n_layers
    assert expected.attention == MODEL.n_layers * forward * 3
    again = seen.forwards - MODEL.n_layers + seen.backwards / 2  # a backward has the scores again
    assert expected.repeated_attention == again * forward


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("windows", [None, [8], [8, "full"]])
def test_pairs_are_those_of_a_dense_mask(world, windows):
    """The ranks' shares of three layers add up to the allowed pairs, counted one by one."""
    model = replace(MODEL, windows=windows)
    sample = packed_sample(LENGTHS, ROWS)
    plans = [make_batch(sample, (r, world), "zigzag", widest(model)).plan for r in range(world)]
    counted = 0
    for layer in range(model.n_layers):
        for length in LENGTHS:
            row, column = torch.arange(length)[:, None], torch.arange(length)
            allowed = column <= row
            if model.window(layer) is not None:
                allowed &= row - column < model.window(layer)
            counted += int(allowed.sum())
    assert sum(allowed_pairs(model, plan) for plan in plans) == counted


def test_utilisation_counts_repeated_work_in_hfu_alone():
    """3 TFLOP of the model and 1 repeated, in 2 s on 5 devices of 1 TFLOP/s."""
    flops = StepFlops(int(1e12), int(2e12), int(6e11), int(4e11))
    shares = flops.utilisation(seconds=2.0, ranks=5, peak_tflops=1.0)
    assert shares == pytest.approx({"mfu": 0.3, "hfu": 0.4})
