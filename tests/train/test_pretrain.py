"""If this fails, training gives another curve on another number of ranks. Whole runs of
``train/pretrain.py``: the same curve for every layout; dead peers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.jobs import HANG_S, ROOT, events, one_line_of, run_ranks, run_script, start_ranks
from train.sections.machine import ALL

STEPS = 10


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(overrides, tmp_path_factory) -> dict[int, Path]:
    """Run folders of one process without a process group, by accumulation."""
    folders = {}
    for accumulation in (1, 2):
        folder = folders[accumulation] = tmp_path_factory.mktemp("alone") / "run"
        own = [f"run.dir={folder}", f"train.gradient_accumulation_steps={accumulation}"]
        done = run_script(*overrides, *own)
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize(
    ("processes", "cp", "accumulation", "same_as"),
    [(3, 3, 2, 2), (2, 1, 1, 2), (4, 2, 1, 2)],
    ids=["cp 3 accumulating 2", "dp 2", "dp 2 x cp 2"],
)
def test_curves_agree(overrides, alone, tmp_path, processes, cp, accumulation, same_as):
    """Loss and gradient norm of every step, clipped, within 1e-5 of one process's (float32).

    AdamW hides the scale of gradients, their norm does not. Two data-parallel groups read the
    samples that one process reads as two micro-batches.
    """
    folder = tmp_path / "run"
    spread = [
        f"parallel.cp={cp}",
        f"train.gradient_accumulation_steps={accumulation}",
        f"run.dir={folder}",
    ]
    run_ranks(processes, *overrides, *spread)
    check_same_curve(metrics(folder), metrics(alone[same_as]))
    own, other = (json.loads((f / "summary.json").read_text()) for f in (folder, alone[same_as]))
    assert (own["world_size"], own["cp"]) == (processes, cp)
    for key in ("nats_per_byte", "nats_per_byte_self_only", "unigram", "bigram", "gzip"):
        assert own[key] == pytest.approx(other[key], rel=1e-4)


def check_same_curve(got: list[dict], expected: list[dict]) -> None:
    """Loss, nats per byte and norm of every step, clipped, agree within 1e-5."""
    assert [record["step"] for record in got] == list(range(1, STEPS + 1))
    for one, other in zip(got, expected, strict=True):
        assert one["grad_norm"] > 0.05
        for key in ("loss", "nats_per_byte", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-5)


WHOLE_JOB = [f"parallel.cp={ALL}", "train.global_batch_size=2"]  # 1,000 tokens a step


def test_one_group_continues_at_any_number_of_ranks(overrides, alone, tmp_path):
    """4 steps on 4 ranks, 3 on 2 under fsdp2, 3 on 1: the curve of cp 1, within 1e-5.

    A step is a micro-batch of both samples, two micro-batches of one, and one of both.
    """
    folder = tmp_path / "run"
    legs = [(4, 4, 250, "ddp"), (2, 7, 250, "fsdp2"), (1, STEPS, 1000, "ddp")]
    for ranks, last, tokens, engine in legs:
        own = [f"train.steps={last}", f"optim.schedule_steps={STEPS}", f"engine={engine}"]
        own += [f"data.tokens_per_rank={tokens}", f"run.dir={folder}", "train.final_eval_bytes=1"]
        run_ranks(ranks, *overrides, *WHOLE_JOB, *own)
    check_same_curve(metrics(folder), metrics(alone[2]))
    assert [text for text in events(folder) if text.startswith("continues")] == [
        f"continues after step {step}, from step-{step:08d}" for step in (4, 7)
    ]


@pytest.mark.soak
@pytest.mark.parametrize(
    "engine",
    ["ddp", "fsdp2", *(pytest.param(f"zero-{n}", marks=pytest.mark.deepspeed) for n in (1, 2, 3))],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_group_has_the_curve_of_one_rank(overrides, alone, tmp_path, ranks, engine):
    """Within 1e-5, and the totals of the evaluation within 1e-4."""
    name, _, stage = engine.partition("-")
    own = [f"data.tokens_per_rank={1000 // ranks}", f"run.dir={tmp_path / 'run'}"]
    own += ["engine=deepspeed", f"engine.stage={stage}"] if stage else [f"engine={name}"]
    run_ranks(ranks, *overrides, *WHOLE_JOB, *own)
    check_same_curve(metrics(tmp_path / "run"), metrics(alone[2]))
    found, wanted = (
        json.loads((f / "summary.json").read_text()) for f in (tmp_path / "run", alone[2])
    )
    assert found["cp"] == ranks
    assert found["held_out_tokens"] == wanted["held_out_tokens"]
    assert found["nats_per_byte"] == pytest.approx(wanted["nats_per_byte"], rel=1e-4)


def test_a_rank_without_tokens_takes_part(overrides, tmp_path):
    """Samples of two tokens over three ranks: the same curve as on one rank, to 1e-5."""
    short = ["data.seq_len=2", "data.max_doc_len=2", "train.steps=3", "train.final_eval_bytes=1"]
    short += ["train.eval_every=0", "train.gradient_accumulation_steps=4"]
    curves = []
    for processes in (1, 3):
        folder = tmp_path / f"run{processes}"
        spread = [f"parallel.cp={processes}", f"run.dir={folder}"]
        run_ranks(processes, *overrides, *short, *spread)
        curves.append([(r["loss"], r["grad_norm"]) for r in metrics(folder)])
    for one, other in zip(*curves, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_run_leaves_its_files(alone):
    folder = alone[1]
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "metrics.jsonl", "eval.jsonl", "events.jsonl", "summary.json", ".lock"),
        *("loss.png", "loss_by_position.png", "tensorboard", "checkpoints", "ranks.json"),
        *("tokenizer.json", ".job"),
    }
    records = metrics(folder)
    keys = [
        "step",
        "loss",
        "perplexity",
        "nats_per_byte",
        "bits_per_byte",
        "grad_norm",
        "lr",
        "tokens_per_s",
        "memory",
        "device_memory",
    ]
    keys += ["skipped", "flops"]
    assert all(list(record) == keys for record in records)
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(record["memory"] > 50e6 for record in records)
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert [record["step"] for record in evaluations] == [4, 8, STEPS]
    summary = json.loads((folder / "summary.json").read_text())
    assert {
        *("nats_per_byte", "bits_per_byte", "nats_per_byte_self_only", "gzip", "unigram"),
        *("bigram", "train_seconds", "world_size", "cp", "seq_len"),
    } <= set(summary)
    assert summary["nats_per_byte"] == evaluations[-1]["nats_per_byte"]


def test_a_mixture_is_evaluated_by_source(overrides, text_folder, tmp_path):
    """Two processes share each sample; every record has each source."""
    lines = [json.dumps({"text": f"{number} " * 40}) for number in range(60)]
    (tmp_path / "numbers.jsonl").write_text("\n".join(lines))
    folder = tmp_path / "run"
    mixed = [s for s in overrides if not s.startswith("data.path=")]
    mixed += [f"data.sources.words.path={text_folder}", "data.sources.words.weight=0.25"]
    mixed += [f"data.sources.numbers.path={tmp_path}/numbers.jsonl", f"run.dir={folder}"]
    mixed += ["data=mixture", "parallel.cp=2", "train.deterministic=true"]
    printed = run_ranks(2, *mixed)
    assert printed.count("deterministic: torch.use_deterministic_algorithms") == 1
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    for record in (*evaluations, summary):
        by_source = record["nats_per_byte_by_source"]
        assert set(by_source) == {"numbers", "words"}
        assert min(by_source.values()) < record["nats_per_byte"] < max(by_source.values())


def test_a_damaged_corpus_is_one_line_with_the_remedy(overrides, pretrain, tmp_path):
    """The error comes before the run folder is made."""
    own = [*overrides, f"data.cache_dir={tmp_path}", f"run.dir={tmp_path / 'run'}"]
    assert pretrain(*own, "train.steps=2", "train.final_eval_bytes=1").returncode == 0
    (path,) = tmp_path.glob("*/train/00000.bin")
    os.truncate(path, 10)
    done = pretrain(*own, f"run.dir={tmp_path / 'new'}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("rank 0, before the first step: DamagedError:")
    assert f"{path} has 10 bytes" in line
    assert f"delete {path.parents[1]} and start again" in line
    assert "DamagedError" in (tmp_path / "new" / "logs" / "rank0.log").read_text()


def test_a_file_may_have_any_name(overrides, pretrain, text_folder, tmp_path):
    """A file that is left out is reported, also if its name is not UTF-8."""
    folder = tmp_path / "text"
    shutil.copytree(text_folder, folder)
    (folder / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"\xff")
    own = [f"data.path={folder}", f"data.cache_dir={tmp_path}", f"run.dir={tmp_path / 'run'}"]
    done = pretrain(*overrides, *own, "train.steps=2", "train.final_eval_bytes=1")
    assert done.returncode == 0, done.stderr
    assert "data.path: 1 left out (caf?.txt): not UTF-8" in done.stdout


def test_the_process_that_tokenises_names_a_bad_line(overrides, tmp_path):
    """Rank 1 alone, as if it held the lock: it prints the error without waiting for rank 0."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\n')
    done = subprocess.run(
        [sys.executable, "train/pretrain.py", *overrides, f"data.path={path}"],
        cwd=ROOT,
        env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert f"pretrain.py: data.path: {path}:2 is not UTF-8" in done.stderr


def test_a_repeated_run_is_bit_equal(overrides, alone, tmp_path):
    """In an interpreter of its own, where the first run was in a fork."""
    folder = tmp_path / "run"
    command = [sys.executable, "train/pretrain.py", *overrides, f"run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=HANG_S)
    for one, other in zip(metrics(folder), metrics(alone[1]), strict=True):
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])


def test_survivors_of_a_killed_rank_report_and_exit_1(overrides, tmp_path):
    folder = tmp_path / "run"
    command = [*overrides, f"run.dir={folder}", "train.steps=100000", "parallel.cp=3"]
    ranks = start_ranks(*[[*command, "parallel.timeout_s=20"]] * 3)
    try:
        recorded = folder / "metrics.jsonl"
        while not (recorded.exists() and recorded.read_text().count("\n") > 2):
            assert all(process.poll() is None for process in ranks)
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGKILL)
        for rank in (0, 2):
            line = one_line_of(rank, ranks[rank], timeout=25)
            assert re.match(rf"rank {rank}, step \d+: .*traceback: .*/rank{rank}\.log", line)
            assert "Traceback" in (folder / "logs" / f"rank{rank}.log").read_text()
    finally:
        for process in ranks:
            process.kill()


def test_ranks_with_different_configs_fail(overrides, tmp_path):
    command = [*overrides, f"run.dir={tmp_path / 'run'}", "parallel.cp=2"]
    ranks = start_ranks([*command, "train.seed=1"], [*command, "train.seed=2"])
    try:
        for rank in (0, 1):
            line = one_line_of(rank, ranks[rank], timeout=HANG_S)
            assert "configuration of rank 1 differs from that of rank 0" in line
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
    ],
    ids=["unset", "set", "set by its older name"],
)
def test_cuda_memory_grows_in_place_unless_the_user_says_otherwise(given, expected):
    """Of an environment without other settings; torch, which reads it once, is imported later."""
    code = "import os, sys; from train.pretrain import set_allocator; set_allocator()"
    code += "; print('torch' in sys.modules, os.environ.get('PYTORCH_ALLOC_CONF'))"
    unset = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(ROOT), **given}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", str(expected)]
