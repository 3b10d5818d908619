"""If this fails, predictions of jobs with several samples a step are wrong. Predictions of jobs
whose micro-batches have several samples: ``data.tokens_per_rank``."""

from __future__ import annotations

import dataclasses

import pytest

from tests.train.estimate.test_prediction import job
from tests.train.test_recipe import composed
from train.checks.config import check
from train.config import Config, ConfigError
from train.estimate.job import Job
from train.estimate.prediction import Limits, predict, smallest_change
from train.pretrain import gpus_of
from train.sections.machine import ALL
from train.tasks.estimate import _documents


def test_documents_are_those_of_all_samples_at_once():
    """Samples of 100 tokens; 50 tokens on each of 6 GPUs are three of them."""
    config = Config()
    config.data.seq_len, config.data.tokens_per_rank, config.parallel.cp = 100, 50, ALL
    config.estimate.document = 60
    assert _documents(config.on(6)) == [0, 60, 100, 160, 200, 260, 300]
    assert _documents(config.on(2)) == [0, 60, 100]


def test_the_gpus_of_one_group_must_be_given():
    config = Config(mode="estimate")
    config.parallel.cp = ALL
    with pytest.raises(ConfigError, match=r"parallel\.cp=all .* for example estimate\.gpus=8$"):
        gpus_of(config, 1)
    assert gpus_of(config, 4) == 4
    config.estimate.gpus = 16
    assert gpus_of(config, 1) == 16
    config.estimate.gpus, config.parallel.cp = None, 2
    assert [gpus_of(config, world) for world in (1, 4)] == [2, 4]


def test_fewer_samples_in_a_micro_batch_are_proposed_before_more_gpus():
    """8b, samples of 128k, 4 at once on 4 GPUs. Less memory needs 2, then 1 at once, then 8 GPUs;
    a step always has 4. No setting of memory and engine fits in 55 GB."""
    large = job("8b", 524288, "fsdp2", recompute="none", mlp_chunk=None)
    data = dataclasses.replace(large.config.data, seq_len=131072, tokens_per_rank=131072)
    config = dataclasses.replace(large.config, data=data)
    large = dataclasses.replace(large, config=config, cu_seqlens=[*range(0, 524289, 131072)])
    assert (large.tokens, large.micro_batches) == (131072, 1)
    found = {gb: smallest_change(large, Limits(gb * 1e9, 550e9)) for gb in (70, 55, 50, 40)}
    assert not any("tokens_per_rank" in name for name in found[70])
    for gb, tokens in ((55, 65536), (50, 32768)):
        batch = f"data.tokens_per_rank={tokens}", "train.global_batch_size=4"
        assert tuple(found[gb][:2]) == batch
    assert found[40][:2] == ["parallel.cp=8 on 8 GPUs", "data.tokens_per_rank=65536"]


def test_the_experiment_of_mixed_lengths_is_as_its_pages_describe_it(tmp_path):
    """docs/recipes.md has the batches, and both predictions of 8 H200, to the last digit there."""
    config = composed("experiment=1b_mixed", "hardware=h200", f"run.dir={tmp_path / 'run'}")
    for gpus, samples in ((2, 4), (8, 4), (16, 8), (64, 32)):
        check(config.on(gpus), gpus)
        assert config.on(gpus).batch_over(1) == samples
    for gpus, tokens in ((16, 32768), (64, 8192)):
        data = dataclasses.replace(config.data, tokens_per_rank=tokens)
        same = dataclasses.replace(config, data=data).on(gpus)
        check(same, gpus)
        assert same.batch_over(1) == 4
    for cp, tokens, samples, predicted in ((ALL, 65536, 4, "23.5 4.5"), (1, 131072, 1, "33.9 8.9")):
        config.mode, config.parallel.cp, config.data.tokens_per_rank = "train", cp, tokens
        eight = config.on(8)
        check(eight, 8)
        eight.mode = "estimate"
        made = Job(eight, 8, 8, eight.model.rows(4096), _documents(eight), here=False)
        assert (made.tokens, made.micro_batches, len(made.cu_seqlens)) == (tokens, 1, samples + 1)
        found = predict(made)
        assert f"{found.memory.device / 1e9:.1f} {found.time.total:.1f}" == predicted
