"""If this fails, a model trains with the learning rate of another size. Each model has a learning
rate and a batch of its own; what is given wins."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from train.checks.config import check
from train.config import Config, ConfigError, register_schema
from train.recipe import RECIPES, recipe_of
from train.run.inherit import resolve_inherited

ROOT = Path(__file__).absolute().parents[2]


def composed(*overrides: str) -> Config:
    """The config of a command line."""
    register_schema()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return resolve_inherited(compose("config", overrides=[*overrides]))


@pytest.mark.parametrize(
    ("model", "lr", "tokens", "samples"),
    [
        ("tiny", 3e-3, None, 4),
        ("125m", 6e-4, 2**19, 128),
        ("1b", 3e-4, 2**19, 128),
        ("8b", 3e-4, 2**22, 1024),
    ],
)
def test_a_model_has_a_rate_and_a_batch_of_its_own(model, lr, tokens, samples):
    """The batch is the same at any number of processes: 4 groups share samples of 4,096 tokens."""
    config = composed(f"model={model}")
    assert (config.optim.lr, config.train.batch_tokens) == (lr, tokens)
    assert config.accumulation_over(4) * 4 == samples


def test_what_is_given_wins(tmp_path):
    config = composed(
        "model=1b", "optim.lr=1e-3", "train.gradient_accumulation_steps=2", "optim.warmup_steps=7"
    )
    assert (config.optim.lr, config.optim.warmup_steps) == (1e-3, 7)
    assert config.accumulation_over(4) == 2
    assert composed("model=1b", "train.global_batch_size=8").accumulation_over(4) == 2
    assert composed("model=8b", "train.batch_tokens=65536").accumulation_over(4) == 4
    assert composed("model=8b", "train.batch_tokens=null").accumulation_over(4) == 1


def test_a_batch_of_tokens_is_at_least_a_sample_for_each_group():
    config = composed("model=125m", "data.seq_len=1048576")
    assert config.accumulation_over(2) == 1
    assert composed("model=125m", "data.seq_len=65536").accumulation_over(3) == 3


@pytest.mark.parametrize("experiment", ["demo", "8b_512k", "1b_1m", "qwen3_8b_1m"])
def test_the_recipes_of_experiments_stay(experiment):
    config = composed(f"experiment={experiment}")
    assert config.optim.lr == {"demo": 5e-3}.get(experiment, 3e-4)
    assert config.optim.warmup_steps == {"demo": 20}.get(experiment, 2)
    assert config.accumulation_over(1) == 1


def test_other_shapes_get_the_recipe_of_the_nearest_size():
    assert composed("model=8b", "model.n_layers=2", "model.dim=1024").optim.lr == 6e-4
    assert [recipe_of(n) for n in (0, 10**6, 10**12)] == [RECIPES[0], RECIPES[0], RECIPES[-1]]
    assert list(RECIPES) == sorted(RECIPES)


def test_the_remedy_of_a_rate_is_that_of_the_size():
    """3e-3, the default of the schema, diverges at this size."""
    with pytest.raises(ConfigError, match=r"the default is optim\.lr=0\.0003"):
        check(composed("model=1b", "optim.lr=0"), world=1)
