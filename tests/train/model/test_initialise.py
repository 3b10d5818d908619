"""If this fails, a sharded model starts from other weights than a whole one. Initial weights: a
rank that holds some rows of a matrix draws those of the whole."""

from __future__ import annotations

import pytest
import torch

from train.config import ModelConfig
from train.model.initialise import BLOCK, draw
from train.model.transformer import Transformer

WIDTH = 1024
HEIGHT = 5 * BLOCK // (2 * WIDTH)  # two blocks and a half


@pytest.fixture(scope="module")
def matrix() -> torch.Tensor:
    values = torch.empty(HEIGHT, WIDTH)
    draw(values, "7 blocks.0.mlp.up.weight", 0, HEIGHT, 0.5)
    return values


@pytest.mark.parametrize(
    ("first", "rows"), [(0, 1), (1000, 100), (1024, 1024), (2047, 513), (9, 0)]
)
def test_any_rows_are_those_of_the_whole(matrix, first, rows):
    values = torch.full((rows, WIDTH), torch.nan)
    draw(values, "7 blocks.0.mlp.up.weight", first, HEIGHT, 0.5)
    assert torch.equal(values, matrix[first : first + rows])


def test_all_values_are_independent_draws_of_the_given_deviation(matrix):
    """Mean and deviation of 2.6 million draws within 1%; blocks, and other names, have others."""
    assert matrix.mean().abs() < 0.005
    assert matrix.std() == pytest.approx(0.5, rel=0.01)
    step = BLOCK // WIDTH
    first, second = matrix[:step], matrix[step : 2 * step]
    assert (first * second).mean().abs() < 0.005
    other = torch.empty_like(first)
    draw(other, "7 blocks.1.mlp.up.weight", 0, HEIGHT, 0.5)
    assert (first * other).mean().abs() < 0.005


def test_biases_start_at_zero():
    named = dict(Transformer(ModelConfig(qkv_bias=True), 300, seed=0).named_parameters())
    biases = [parameter for name, parameter in named.items() if name.endswith(".bias")]
    assert len(biases) == 3 * ModelConfig().n_layers
    assert not any(bias.any() for bias in biases)
