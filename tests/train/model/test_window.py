"""If this fails, models with several windows train differently over ranks. Layers of different
windows that share a sample over ranks, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ringfa3 import plan_context
from tests.support.ranks import Ranks
from tests.train.model.test_transformer import SMALL, VOCABULARY, packed_sample
from train.config import ModelConfig
from train.data.batches import make_batch
from train.model.transformer import LanguageModel, Transformer
from train.model.window import narrowed, widest

LENGTHS = [37, 1, 64, 2, 51]


def step(group: dist.ProcessGroup | None, windows: list[int | str]) -> list[torch.Tensor]:
    """The loss of every token, and the gradients of their sum, over all ranks of ``group``."""
    config = ModelConfig(**{**SMALL, "n_layers": 3}, zero_init=False, windows=windows)
    model = LanguageModel(Transformer(config, VOCABULARY, 3, group=group), torch.float32, 50)
    batch = make_batch(packed_sample(LENGTHS), group, "zigzag", widest(config))
    losses = model(batch)
    grads = torch.autograd.grad(losses.sum(), list(model.parameters()))
    if group is not None:
        for grad in grads:
            dist.all_reduce(grad, group=group)
    return [batch.plan.unshard(losses.detach()), *grads]


@pytest.mark.parametrize("windows", [[5, "full", 9], [6, 4]], ids=["one full", "none full"])
def test_three_ranks_compute_what_one_process_does(ranks: Ranks, windows):
    """float32: 1e-5 of the largest loss, and of the largest number of each gradient."""
    expected = step(None, windows)
    for found in ranks.run(3, step, windows):
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max() + 1e-6


def test_a_narrower_plan_keeps_its_window():
    """The evaluation in which each token attends only to itself; a plan of the widest window."""
    alone = plan_context([0, 9], (0, 1), window_size=(0, 0))
    assert narrowed(alone, 4) is narrowed(alone, None) is alone
    for windows, of_plan in (([6, 4], (5, -1)), ([6, "full"], (-1, -1)), (None, (-1, -1))):
        assert widest(ModelConfig(windows=windows)) == of_plan
    plan = plan_context([0, 9], (0, 1), window_size=(5, -1))
    assert narrowed(plan, 6) is plan
    assert narrowed(plan, 4).effective_window == (3, 0)
