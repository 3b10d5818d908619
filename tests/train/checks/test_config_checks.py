"""If this fails, a run with settings that cannot work starts, and fails later. Config values that
cannot work, and the nearest valid ones."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace

import pytest

from ringfa3.validation import (
    LAYOUTS,
    LEAST_SCALE,
    PRECISIONS,
    QUANTISED_HEAD_DIMS,
    TRANSPORTS,
    TRANSPORTS_OF,
)
from train.checks import machine, model
from train.checks.config import check
from train.config import ConfigError, EngineConfig
from train.keys import get, schema
from train.sections.data import SourceConfig
from train.sections.machine import ALL

ZERO = {"engine.name": "deepspeed", "engine.stage": 3, "engine.offload": "none"}


def test_without_deepspeed_its_engine_is_rejected_with_the_extra(config, monkeypatch):
    config.engine = EngineConfig("deepspeed", stage=3, offload="none")
    monkeypatch.setattr(machine, "installed", lambda package: True)
    check(config, world=1)
    monkeypatch.setattr(machine, "installed", lambda package: package != "deepspeed")
    with pytest.raises(ConfigError, match=r"is not installed; pip install -e '\.\[deepspeed\]'"):
        check(config, world=1)


def test_sources_and_their_weights_must_fit(config, text_folder):
    sources = config.data.sources
    sources["books"] = SourceConfig(path=str(text_folder), weight=3e6)
    with pytest.raises(ConfigError, match=r"data\.path=.* and data\.sources \(books\) are both"):
        check(config, world=1)
    config.data.path = None
    check(config, world=1)
    sources["code"] = SourceConfig(path=str(text_folder), weight=2)
    with pytest.raises(ConfigError, match=r"code\.weight=2 is less than 1e-06 of all") as raised:
        check(config, world=1)
    sources["code"].weight = float(str(raised.value).rpartition("=")[2])
    check(config, world=1)
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        sources["code"].weight = weight
        with pytest.raises(ConfigError, match=rf"data\.sources\.code\.weight={weight} must be"):
            check(config, world=1)
    sources["code"] = SourceConfig(path=str(text_folder / "nothing"), weight=9)
    with pytest.raises(ConfigError, match=r"data\.sources\.code\.path=.*nothing does not exist"):
        check(config, world=1)
    sources["a/b"] = sources.pop("code")
    with pytest.raises(ConfigError, match=r"data\.sources\.a/b: the name"):
        check(config, world=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory.recompute": "ful"}, "nearest valid: memory.recompute=full"),
        ({"train.attention": "sdp"}, "nearest valid: train.attention=sdpa"),
        (
            {"train.attention": "sdpa", "memory.recompute": "attention-saving"},
            "nearest valid: memory.recompute=full",
        ),
        ({"train.compile": "blocks"}, "nearest valid: train.compile=block"),
        (
            {
                "train.compile": "block",
                "memory.offload": "residual",
                "memory.recompute": "attention-saving",
            },
            "memory.offload=residual moves tensors while a block runs, which a compiled block "
            "cannot; nearest valid: train.compile=auto (or memory.offload=none)",
        ),
        (
            {"train.compile": "block", "train.deterministic": True},
            "by timing them; nearest valid: train.compile=auto (or train.deterministic=false)",
        ),
        (
            {"train.compile": "block", "train.attention": "sdpa"},
            "nearest valid: train.compile=auto (or train.attention=ringfa3)",
        ),
        ({"memory.offload": "al"}, "nearest valid: memory.offload=all"),
        (
            {"memory.offload": "residual"},
            "memory.recompute=none keeps every activation; nearest valid: "
            "memory.recompute=attention-saving",
        ),
        (
            {"memory.offload": "all", "memory.recompute": "full"},
            "nearest valid: memory.recompute=attention-saving (or memory.offload=residual)",
        ),
        (
            {
                "memory.offload": "residual",
                "memory.recompute": "full",
                "memory.offload_layers": 4,
            },
            "of the 4 layers that recompute, the last stays on the device; nearest valid: "
            "memory.offload_layers=3",
        ),
        (
            {"memory.offload": "residual", "memory.recompute": "full", "model.n_layers": 1},
            "nearest valid: memory.offload=none",
        ),
        ({"memory.recompute_layers": 2}, "nearest valid: memory.recompute=attention-saving"),
        (
            {"memory.recompute_layers": 5, "memory.recompute": "full"},
            "exceeds model.n_layers=4; nearest valid: memory.recompute_layers=4",
        ),
        (
            {
                "memory.recompute_layers": 3,
                "memory.recompute": "full",
                "memory.offload": "residual",
                "memory.offload_layers": 3,
            },
            "of the 3 layers that recompute, the last stays on the device; nearest valid: "
            "memory.offload_layers=2",
        ),
        ({"memory.mlp_chunk": 0}, "nearest valid: memory.mlp_chunk=1"),
        ({"model.attention_precision": "fp4"}, "nearest valid: model.attention_precision=fp8"),
        (
            {"model.attention_precision": "fp8"},
            "does not support head dim 32; nearest valid: model.head_dim=64",
        ),
        (
            {
                "model.attention_precision": "fp8",
                "model.head_dim": 64,
                "parallel.cp": 2,
                "parallel.transport": "symmetric",
            },
            "nearest valid: parallel.transport=auto",
        ),
        (
            {
                "model.attention_precision": "int8",
                "model.head_dim": 64,
                "train.attention": "sdpa",
            },
            "nearest valid: model.attention_precision=native",
        ),
        (
            {"train.global_batch_size": 4, "train.gradient_accumulation_steps": 2},
            "both set the samples of a step; nearest valid: train.gradient_accumulation_steps=1",
        ),
        ({"engine.name": "fsdp"}, "ddp, fsdp2, deepspeed; nearest valid: engine.name=fsdp2"),
        ({"engine.name": "fsdp2", "engine.shard": "hspd"}, "nearest valid: engine.shard=hsdp"),
        ({"engine.shard": "all"}, "a key of engine=fsdp2, not of engine=ddp; leave it out"),
        ({"model.softmax_scale": 0.0}, "nearest valid: model.softmax_scale=5.42"),
        ({"model.vocab_size": 299}, "nearest valid: model.vocab_size=300"),
        ({**ZERO, "engine.stage": 5}, "allowed are 1, 2, 3; nearest valid: engine.stage=3"),
        ({**ZERO, "engine.stage": None}, "nearest valid: engine.stage=1"),
        ({**ZERO, "engine.offload": "optimiser"}, "nearest valid: engine.offload=optimizer"),
        ({**ZERO, "engine.stage": 2, "engine.offload": "all"}, "valid: engine.offload=optimizer"),
        ({**ZERO, "engine.shard": "hsdp"}, "a key of engine=fsdp2, not of engine=deepspeed"),
        ({"engine.stage": 3}, "a key of engine=deepspeed, not of engine=ddp; leave it out"),
        ({"train.steps": 0}, "nearest valid: train.steps=1"),
        ({"optim.lr": 0.0}, "optim.lr=0.0 must be above 0; the default is optim.lr=0.003"),
        ({"optim.betas": [0.9, 1.0]}, "the default is optim.betas=[0.9, 0.95]"),
        ({"data.max_doc_len": 512}, "exceeds data.seq_len=256"),
        ({"data.held_out": 1.0}, "must be below 1; the default is data.held_out=0.05"),
        ({"data.held_out": 0.0}, "0 needs documents of data.validation_path"),
        ({"data.validation_path": "/"}, "nearest valid: data.held_out=0"),
        (
            {"data.validation_path": "/nowhere", "data.held_out": 0.0},
            "data.validation_path=/nowhere does not exist",
        ),
        ({"train.eval_bytes": "some"}, "nearest valid: train.eval_bytes=auto"),
        ({"train.final_eval_bytes": 0}, "nearest valid: train.final_eval_bytes=1"),
        ({"data.tokenizer": "/nowhere.json"}, "data.tokenizer=/nowhere.json does not exist"),
        ({"model.head_dim": 31}, "model.head_dim=32"),
        ({"model.n_heads": 3}, "model.n_kv_heads=2"),
        (
            {"model.rope.type": "llama3", "model.rope.low_freq_factor": 4.0},
            "model.rope.high_freq_factor=4.0",
        ),
        ({"model.rope.type": "llama"}, "nearest valid: model.rope.type=llama3"),
        (
            {"model.rope.factor": 4.0},
            "a key of model.rope.type=linear and llama3 and yarn, not of model.rope.type=default; "
            "nearest valid: model.rope.type=llama3",
        ),
        (
            {"model.rope.type": "llama3", "model.rope.beta_fast": 8.0},
            "nearest valid: model.rope.type=yarn",
        ),
        (
            {"model.rope.type": "yarn", "model.rope.beta_slow": 32.0},
            "must be below model.rope.beta_fast=32.0; the defaults are 1.0 and 32.0",
        ),
        (
            {"model.rope.type": "yarn", "model.rope.theta": 1.0},
            "model.rope.theta=1.0 must be above 1",
        ),
        ({"optim.schedule": "wds"}, "nearest valid: optim.schedule=wsd"),
        (
            {"optim.decay_steps": 5},
            "a key of optim.schedule=wsd, not of cosine; nearest valid: optim.decay_steps=null",
        ),
        (
            {"optim.schedule": "wsd", "optim.decay_steps": 271},
            "exceeds the 270 steps that the warm-up leaves",
        ),
        ({"data.packing": "bestfit"}, "nearest valid: data.packing=best_fit"),
        ({"data.min_len": 0}, "nearest valid: data.min_len=1"),
        ({"train.final_eval_last": 257}, "nearest valid: train.final_eval_last=256"),
        (
            {"train.final_eval_len": 64, "train.final_eval_last": 65},
            "nearest valid: train.final_eval_last=64",
        ),
        ({"train.final_eval_len": 257}, "nearest valid: train.final_eval_len=256"),
        ({"mode": "rope", "rope.types": ["yarm"]}, "nearest valid: rope.types=[yarn]"),
        ({"mode": "rope", "rope.types": ["default"]}, "allowed are linear, llama3, yarn"),
        ({"mode": "rope", "rope.factors": [1.0]}, "rope.factors=[1.0]: 1.0 must be above 1"),
        ({"mode": "needle", "needle.trials": 0}, "nearest valid: needle.trials=1"),
        ({"model.windows": []}, "nearest valid: model.windows=[full]"),
        (
            {"data.packing": "best_fit", "data.document_mask": False},
            "nearest valid: data.packing=stream",
        ),
        ({"model.windows": [8] * 5}, "nearest valid: model.windows=[8, 8, 8, 8]"),
        ({"model.windows": [8, 0]}, "[8, 0]: 0 is too small; nearest valid: model.windows=[8, 1]"),
        (
            {"model.windows": [8, "ful"]},
            "ful must be a number or full; nearest valid: model.windows=[8, full]",
        ),
        (
            {"model.windows": [8], "train.attention": "sdpa"},
            "nearest valid: model.windows=null (or train.attention=ringfa3)",
        ),
        ({"mode": "export"}, "give it with export.dir=FOLDER"),
        ({"mode": "export", "export.dir": "/"}, "export.dir=/ exists; choose an empty or a new"),
        ({"export.dtype": "float16"}, "nearest valid: export.dtype=bfloat16"),
        ({"mode": "chek"}, "nearest valid: mode=check"),
        ({"mode": "verify"}, "nearest valid: parallel.cp=2"),
        (
            {
                "mode": "verify",
                "parallel.cp": 2,
                "model.head_dim": 64,
                "model.attention_precision": "int8",
            },
            "nearest valid: model.attention_precision=native",
        ),
        ({"memory.offload_layers": 1}, "nearest valid: memory.offload=residual"),
        ({"profile.steps": [5, 3]}, "for example profile.steps=[3,5]"),
        ({"profile.steps": [1, 301]}, "train.steps=300"),
        ({"profile.steps": [1]}, "must have 2 entries; nearest valid: profile.steps=[1, 1]"),
        ({"profile.steps": [1, 2], "profile.ranks": [0, 1]}, "profile.ranks=[0]"),
        ({"profile.memory": True}, "needs profile.steps"),
        ({"generate.temperature": -1.0}, "nearest valid: generate.temperature=0"),
        ({"sweep.nproc_per_node": 0}, "nearest valid: sweep.nproc_per_node=1"),
        ({"data.split_on": ""}, "data.split_on is empty; give a separator"),
        ({"data.bos_token": ""}, "for example data.bos_token='<|endoftext|>'"),
        ({"mode": "eval", "eval.path": "/tmp", "data.split_on": ""}, "data.split_on is empty"),
        (
            {"data.path": None, "data.sources": {"a": SourceConfig("/tmp", split_on="")}},
            "data.sources.a.split_on is empty",
        ),
        ({"mode": "eval", "eval.path": "/nowhere.txt"}, "eval.path=/nowhere.txt does not exist"),
        ({"mode": "eval", "eval.name": "a/b"}, "no slashes"),
        ({"train.max_wall_time": 0.0}, "train.max_wall_time=0.0 must be above 0"),
        ({"guard.sigma": -1.0}, "above 0; the default is guard.sigma=null"),
        ({"checkpoint.keep": 0}, "nearest valid: checkpoint.keep=1"),
        ({"checkpoint.resume": "always"}, "must be auto, never or the folder of a run"),
        ({"checkpoint.reset_data": True}, "checkpoint.resume=auto names none; give"),
        ({"checkpoint.init_from": "/nowhere"}, "checkpoint.init_from=/nowhere must be the folder"),
    ],
)
def test_invalid_values_are_rejected(config, changes, message):
    check(config, world=1)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        setattr(get(config, section) if section else config, name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, world=config.parallel.cp)


def test_the_batch_must_fit_the_data_parallel_size(config):
    config.train.global_batch_size, config.parallel.cp = 6, 2
    check(config, world=6)
    assert config.accumulation_over(3) == 2
    with pytest.raises(
        ConfigError,
        match=r"train\.global_batch_size=6 .* 4 .*; nearest valid: train\.global_batch_size=8",
    ):
        check(config, world=8)


def test_context_group_must_divide_the_world(config):
    config.parallel.cp = 4
    with pytest.raises(ConfigError, match=r"parallel\.cp=4 .* 6; nearest valid: parallel\.cp=3"):
        check(config, world=6)
    check(config, world=8)


@pytest.mark.parametrize(
    ("world", "tokens", "batch", "message"),
    [
        (4, 64, None, None),
        (4, 192, 6, None),
        (4, 100, None, r"tokens_per_rank=100 gives the 4 ranks .* 400 tokens, .* no whole samples "
         r"of data\.seq_len=256; nearest valid: data\.tokens_per_rank=128$"),
        (4, 1, None, r"nearest valid: data\.tokens_per_rank=64 \(or data\.seq_len=4\)$"),
        (3, 64, None, r"nearest valid: data\.tokens_per_rank=256 \(or data\.seq_len=192\)$"),
        (4, 192, 4, r"global_batch_size=4 is not a multiple of the 3 samples .*=192 puts in a "
         r"micro-batch; nearest valid: .*global_batch_size=3 \(or data\.tokens_per_rank=128\)$"),
        (8, 32, 3, None),
        (8, 96, 1, r"nearest valid: train\.global_batch_size=3 \(or data\.tokens_per_rank=32\)$"),
    ],
)  # fmt: skip
def test_tokens_of_a_rank_must_be_whole_samples_of_the_group(config, world, tokens, batch, message):
    """Each remedy passes; samples have 256 tokens."""
    config.parallel.cp, config.data.tokens_per_rank = ALL, tokens
    config.train.global_batch_size = batch
    if message is None:
        check(config.on(world), world)
        return
    with pytest.raises(ConfigError, match=message) as raised:
        check(config.on(world), world)
    for remedy in re.findall(r"(?:valid: |\(or )([\w.]+)=(\d+)", str(raised.value)):
        section, name = remedy[0].split(".")
        changed = replace(
            config, **{section: replace(getattr(config, section), **{name: int(remedy[1])})}
        )
        check(changed.on(world), world)


def test_verify_checks_the_samples_that_it_takes(config):
    config.mode, config.parallel.cp, config.data.tokens_per_rank = "verify", 2, 128
    check(config, world=2)
    config.verify.seq_len = 60
    with pytest.raises(ConfigError, match=r"verify\.seq_len=60; nearest valid: .*_per_rank=120"):
        check(config, world=2)
    config.verify.seq_len = 64
    check(config, world=2)
    assert config.comparable().samples_at_once() == 4
    config.train.global_batch_size = 2
    with pytest.raises(ConfigError, match=r"=2 is not a multiple of the 4 .*_batch_size=4 \(or"):
        check(config, world=2)
    config.data.seq_len, config.verify.seq_len, config.train.global_batch_size = 64, 256, 1
    check(config, world=2)


def test_modes_that_use_a_run_take_its_tokens_on_any_number_of_ranks(config):
    """The run had many ranks; one process reads a sample at once."""
    config.mode, config.parallel.cp, config.data.tokens_per_rank = "eval", ALL, 16
    for world in (1, 32):
        here = config.on(world)
        check(here, world)
        assert here.samples_at_once() == max(1, world // 16)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_sdpa_is_rejected_if_processes_share_a_sample(config, mode):
    config.train.attention, config.mode = "sdpa", mode
    check(config, world=4)
    config.parallel.cp = 2
    with pytest.raises(ConfigError, match=r"sdpa .*parallel\.cp=2 .*valid: parallel\.cp=1"):
        check(config, world=4)


def test_wandb_must_be_installed_to_be_switched_on(config, monkeypatch, tmp_path):
    """A folder ``wandb`` in the working directory is not the package."""
    config.log.wandb = True
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"log\.wandb=true.*pip install -e '\.\[wandb\]'"):
        check(config, world=1)
    (tmp_path / "wandb").mkdir()
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"log\.wandb=true"):
        check(config, world=1)
    (tmp_path / "wandb" / "__init__.py").touch()
    importlib.invalidate_caches()
    check(config, world=1)


def test_layouts_and_transports_are_those_of_ringfa3():
    """The checks list them again, for they run without importing PyTorch."""
    assert set(schema()["parallel.layout"].limits.choices) == set(LAYOUTS)
    assert set(schema()["parallel.transport"].limits.choices) == set(TRANSPORTS)
    assert set(schema()["model.attention_precision"].limits.choices) == set(PRECISIONS)
    assert model.QUANTISED_HEAD_DIMS == QUANTISED_HEAD_DIMS
    scale = schema()["model.softmax_scale"].limits
    assert (scale.at_least, scale.at_most) == (LEAST_SCALE, 1 / LEAST_SCALE)
    assert set(TRANSPORTS) == {"auto"}.union(*TRANSPORTS_OF.values())
