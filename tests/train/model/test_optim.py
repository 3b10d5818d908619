"""If this fails, learning rates or weight decay differ from the settings. The schedule against
values computed by hand; which parameters have weight decay."""

from __future__ import annotations

import pytest

from train.config import ModelConfig, OptimConfig
from train.model.optim import make_optimizer, set_learning_rate
from train.model.transformer import Transformer
from train.run.schedule import describe, learning_rate, warmup_steps


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 8: 0.5 * 0.9 + 0.1, 11: 0.125 * 0.9 + 0.1}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 8: 0.5 * 0.9 + 0.1, 6: 0.853553 * 0.9 + 0.1}),
        ("wsd", {0: 0.25, 3: 1.0, 4: 1.0, 9: 1.0, 10: 2 / 3 * 0.9 + 0.1, 11: 1 / 3 * 0.9 + 0.1}),
    ],
)
def test_learning_rates(schedule, expected):
    """Four steps of warm-up, eight of decay to a tenth (wsd: three): to six digits."""
    optim = OptimConfig(lr=2.0, schedule=schedule, warmup_steps=4, final_lr_ratio=0.1)
    optim.decay_steps = 3 if schedule == "wsd" else None
    for step, share in expected.items():
        assert learning_rate(optim, step, steps=12) == pytest.approx(2 * share, rel=1e-6)


def test_wsd_decays_in_the_last_tenth():
    optim = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=0)
    rates = [learning_rate(optim, step, steps=40) for step in range(40)]
    assert rates == pytest.approx([1.0] * 37 + [0.75, 0.5, 0.25])


def test_linear_decay_ends_one_step_above_zero():
    optim = OptimConfig(lr=1.0, schedule="linear", warmup_steps=0)
    rates = [learning_rate(optim, step, steps=10) for step in range(10)]
    assert rates == pytest.approx([1 - step / 10 for step in range(10)])


def test_a_schedule_may_be_longer_or_shorter_than_the_run():
    optim = OptimConfig(lr=1.0, schedule="linear", warmup_steps=0, schedule_steps=4)
    optim.final_lr_ratio = 0.2
    rates = [learning_rate(optim, step, steps=6) for step in range(6)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    optim.schedule_steps, optim.schedule = 8, "cosine"
    assert learning_rate(optim, 4, steps=5) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("given", "schedule", "steps", "expected"),
    [
        (None, None, 300, 30),
        (None, None, 50_000, 2000),
        (None, 100, 300, 10),
        (None, None, 5, 0),
        (250, None, 300, 250),
        (300, None, 300, 300),
        (2000, None, 300, 30),
        (2000, 50_000, 300, 2000),
    ],
)
def test_a_warm_up_ends_within_the_schedule(given, schedule, steps, expected):
    """A setting that fits is taken as it is; one that does not is shortened, with a clause."""
    optim = OptimConfig(warmup_steps=given, schedule_steps=schedule, lr=1.0)
    assert warmup_steps(optim, steps) == expected
    assert learning_rate(optim, expected, steps) == 1.0
    shortened = given is not None and given != expected
    assert ("is shortened" in describe(optim, steps)) == shortened
    assert f"after {expected} steps of warm-up" in describe(optim, steps)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(tied):
    model = Transformer(ModelConfig(tied_embeddings=tied, qkv_bias=True), vocab_size=300, seed=0)
    optim = OptimConfig(lr=1e-3, embedding_lr_scale=3.0, weight_decay=0.1)
    optimizer = make_optimizer(model, optim)
    set_learning_rate(optimizer, 0.5)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(group_of)
    assert set(group_of) == {id(p) for p in model.parameters()}
    for name, parameter in model.named_parameters():
        group = group_of[id(parameter)]
        embedding = name == "embedding.weight"
        assert group["weight_decay"] == (0.1 if parameter.ndim == 2 and not embedding else 0.0)
        assert group["lr"] == (1.5 if embedding else 0.5)
