"""If this fails, the report of a failed job names the wrong rank. The report of a failed rank."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import time

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from ringfa3.errors import RingError
from tests.train.held_runs import hold_run
from train.checks.config import check
from train.checks.training import check_offload
from train.config import Config, MemoryConfig
from train.run.failure import (
    FailureReport,
    explain,
    is_of_a_peer,
    is_out_of_memory,
    memory_advice,
)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The file that torchrun reads."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_the_report_of_a_killed_rank_is_written_in_advance(report):
    failure = FailureReport(3, io.StringIO())
    assert not report.exists()
    failure.begin_step(8)
    content = json.loads(report.read_text())
    assert content["message"].startswith("rank 3, step 8: killed by a signal")
    assert abs(content["timestamp"] - time.time()) < 5


def test_only_torchrun_prints_an_error_unless_it_restarts(report, tmp_path, monkeypatch, config):
    console = io.StringIO()
    failure = FailureReport(1, console)
    failure.begin_step(2)
    log = tmp_path / "rank1.log"
    failure.report(ValueError("no\n such"), log, config)
    message = json.loads(report.read_text())["message"]
    assert message == f"rank 1, step 2: ValueError: no such (traceback: {log})"
    assert "ValueError: no\n such" in log.read_text()
    assert console.getvalue() == ""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    failure.report(ValueError("no such"), log, config)
    assert console.getvalue() == f"{message}\n"


def test_without_torchrun_the_rank_prints_the_error(tmp_path, monkeypatch, config):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    console = io.StringIO()
    log = tmp_path / "logs" / "rank0.log"  # a run that fails at once has no folder yet
    FailureReport(0, console).report(KeyError("x"), log, config)
    assert "KeyError: 'x'" in log.read_text()
    assert console.getvalue().startswith("rank 0, before the first step: KeyError: 'x'")


def test_a_consequence_is_never_the_root_cause(report, tmp_path, config):
    """torchrun takes the earliest failure, in whole seconds, for the root cause."""
    failure = FailureReport(0, io.StringIO())
    begin = int(time.time())
    failure.report(RingError("rank 1 is gone"), tmp_path / "log", config)
    assert json.loads(report.read_text())["timestamp"] > begin


def test_a_rank_that_stops_without_saving_is_not_the_root_cause(report, capsys):
    """Its step began long ago; the failure that led to the stop must come first."""
    failure = FailureReport(0, io.StringIO())
    failure.begin_step(9)
    begin = int(time.time())
    failure.not_saved("SIGTERM, but nothing was saved: no answer from rank 1")
    content = json.loads(report.read_text())
    assert content["timestamp"] > begin
    assert content["message"].startswith("rank 0, step 9: SIGTERM, but nothing was saved")
    assert "rank 0, step 9: SIGTERM" in capsys.readouterr().err


def test_characters_that_a_console_cannot_print_are_escaped(report, tmp_path, config):
    FailureReport(1, io.StringIO()).report(OSError("no \udcff"), tmp_path / "log", config)
    assert "no \\udcff" in json.loads(report.read_text())["message"]


def test_a_full_disk_does_not_hide_the_error(report, tmp_path, config):
    (tmp_path / "logs").write_text("a file where the folder should be")
    FailureReport(1, io.StringIO()).report(KeyError("x"), tmp_path / "logs" / "rank1.log", config)
    assert "KeyError: 'x'" in json.loads(report.read_text())["message"]


def test_errors_that_a_peer_can_cause():
    gloo = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Connection reset by peer")
    for error in (RingError("x"), dist.DistStoreError("x"), ConnectionResetError(), gloo):
        assert is_of_a_peer(error)
    assert not is_of_a_peer(RuntimeError("shape mismatch"))


def test_advice_names_a_sharded_engine_to_several_processes_of_ddp(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "engine" not in memory_advice(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "engine=fsdp2" in memory_advice(config)
    config.engine.name, config.engine.shard = "fsdp2", "all"
    assert "engine" not in memory_advice(config)


def followed(config: Config, names: str) -> Config:
    """``config`` with overrides of an advice, such as ``data.seq_len=64 and ...``, as YAML."""
    changed = OmegaConf.structured(config)
    changed.merge_with_dotlist(re.findall(r"[\w.]+=\w+", names))
    return OmegaConf.to_object(changed)


@pytest.mark.parametrize(
    ("tokens", "batch_tokens", "steps", "advice"),
    [
        (256, None, None, "128 and train.global_batch_size=8, "),
        (256, None, 3, "192 and train.global_batch_size=24 and "
         "train.gradient_accumulation_steps=null, "),
        (192, 1024, None, "96 and train.global_batch_size=6, "),
    ],
)  # fmt: skip
def test_fewer_tokens_of_a_rank_keep_the_samples_of_a_step(
    config, monkeypatch, tokens, batch_tokens, steps, advice
):
    """8 ranks share 8 or 6 samples of 256 tokens at once. The run continues with its batch."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    config.parallel.cp, config.data.tokens_per_rank = 8, tokens
    config.train.batch_tokens, config.train.gradient_accumulation_steps = batch_tokens, steps
    hold_run(config)
    found = memory_advice(config)
    assert f"in this order try: data.tokens_per_rank={advice}" in found
    fewer = followed(config, found.partition(", ")[0])
    check(fewer, world=8)
    assert fewer.batch_over(1) == config.batch_over(1)
    assert fewer.samples_at_once() < config.samples_at_once()


def test_with_one_sample_at_once_more_ranks_and_shorter_samples_free_memory(config, monkeypatch):
    """Both need fewer tokens of a rank: ``data.tokens_per_rank`` is what a rank holds."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    config.parallel.cp, config.data.tokens_per_rank = 8, 32
    more = "parallel.cp=16 with more processes and data.tokens_per_rank=16"
    shorter = "data.seq_len=128 and data.tokens_per_rank=16"
    found = memory_advice(config)
    assert found.endswith(f", {more}, {shorter}")
    assert found.count("data.tokens_per_rank") == 2
    check(followed(config, more), world=16)
    check(followed(config, shorter), world=8)
    config.data.seq_len, config.data.tokens_per_rank = 200, 25
    assert "parallel.cp" not in memory_advice(config)


@pytest.mark.parametrize(
    ("seq_len", "verified", "tokens", "advice"),
    [
        (250, 100, None, "verify.seq_len=50"),
        (256, None, 32, "verify.seq_len=128 and data.tokens_per_rank=16"),
        (250, 100, 75, "verify.seq_len=48 and data.tokens_per_rank=36"),
    ],
)
def test_a_verification_gets_shorter_samples_as_many_at_once(
    config, monkeypatch, seq_len, verified, tokens, advice
):
    """75 tokens on each of 8 ranks are 6 samples of 100, and 36 are 6 of 48."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    config.mode, config.parallel.cp = "verify", 8
    config.data.seq_len, config.verify.seq_len = seq_len, verified
    config.data.tokens_per_rank = tokens
    assert memory_advice(config).endswith(f"shorten the samples: {advice}")
    shorter = followed(config, advice)
    check(shorter, world=8)
    before, after = config.comparable(), shorter.comparable()
    assert after.samples_at_once() == before.samples_at_once()
    assert 2 * after.data.seq_len <= before.data.seq_len


@pytest.mark.parametrize(
    ("attention", "recompute", "offload", "n_layers", "advice"),
    [
        ("ringfa3", "none", "none", 2, {"recompute": "attention-saving", "offload": "all"}),
        ("ringfa3", "none", "none", 1, {"recompute": "attention-saving"}),
        ("ringfa3", "attention-saving", "none", 2, {"offload": "all"}),
        ("ringfa3", "attention-saving", "none", 1, {"recompute": "full"}),
        ("ringfa3", "attention-saving", "residual", 2, {"offload": "all"}),
        ("ringfa3", "attention-saving", "all", 2, {}),
        ("ringfa3", "full", "none", 2, {"offload": "residual"}),
        ("ringfa3", "full", "none", 1, {}),
        ("sdpa", "none", "none", 2, {"recompute": "full", "offload": "residual"}),
    ],
)
def test_advice_on_recomputation_and_offload_can_be_followed_at_once(
    config, attention, recompute, offload, n_layers, advice
):
    config.train.attention, config.model.n_layers = attention, n_layers
    config.memory.recompute, config.memory.offload = recompute, offload
    found = re.findall(r"memory\.(recompute|offload)=([\w-]+)", memory_advice(config))
    assert found == list(advice.items())
    check_offload(dataclasses.replace(config.memory, **advice), n_layers)


@pytest.mark.parametrize(
    ("rows", "tokenizer", "advice"),
    [
        (None, None, ["16384"]),
        (None, "a.json", []),
        (8192, "a.json", ["8192"]),
        (128_256, None, []),
    ],
)
def test_advice_on_the_loss_knows_the_vocabulary_or_says_nothing(config, rows, tokenizer, advice):
    """2^26 logits at a time, but at least those of 1,024 tokens."""
    config.memory.loss_chunk, config.data.vocab_size = None, 4096
    config.model.vocab_size, config.data.tokenizer = rows, tokenizer
    found = re.findall(r"loss_chunk=1024 \(now (\d+)\)", memory_advice(config))
    assert found == advice


def test_advice_sets_apart_what_a_run_may_not_change(config):
    """Once the folder holds the run; ``engine`` is a group of settings that it may change."""
    config.train.precision = "bfloat16"
    before = memory_advice(config)
    assert "train.residual=bfloat16, memory.recompute=attention-saving" in before
    assert "new run" not in before
    hold_run(config)
    first, _, second = memory_advice(config).partition("; in a new run (another run.dir, or ")
    assert "memory.recompute=attention-saving" in first
    assert first.endswith("parallel.cp=2 with more processes")
    assert second == "run.overwrite=true) try: train.residual=bfloat16, data.seq_len=128"
    config.train.attention = "sdpa"
    config.memory = MemoryConfig("full", mlp_chunk=64, loss_chunk=64, offload="residual")
    hold_run(config)
    assert memory_advice(config).startswith("-- out of memory; in a new run (")


def test_memory_may_be_the_cause_of_an_error():
    refused = ValueError("rank 0: OutOfMemoryError: x")
    refused.__cause__ = torch.OutOfMemoryError("x")
    assert is_out_of_memory(refused)
    assert not is_out_of_memory(ValueError("x"))


def test_advice_when_out_of_memory_names_helpful_values(config):
    config.memory.loss_chunk, config.train.precision = 4096, "bfloat16"
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    content = explain(caught.value, config)
    for setting in (
        *("loss_chunk=1024", "residual=bfloat16", "recompute=attention-saving"),
        *("mlp_chunk=16384", "offload=all"),
        *("cp=2", "seq_len=128"),
    ):
        assert setting in content
    config.train.precision = "float32"
    assert "residual" not in explain(caught.value, config)
    config.train.attention = "sdpa"
    content = explain(torch.OutOfMemoryError("x"), config)
    assert not any(setting in content for setting in ("attention-saving", "cp="))
    assert "out of memory" not in explain(ValueError("x"), config)


def test_a_verification_without_memory_needs_shorter_samples(config):
    """More processes do not help: with cp 1 one of them holds a whole sample."""
    config.mode = "verify"
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    assert explain(error, config) == (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB "
        "-- out of memory; shorten the samples: verify.seq_len=128"
    )
