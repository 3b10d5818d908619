"""If this fails, the comparison with other trainers is unfair, or hides a failure. The comparison
of trainers: samples, alternation, ratios and bars, profiles, failures, a whole run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import hf_ring_flash_attn
from benchmarks.compare_trainers import __main__ as compare_trainers
from benchmarks.compare_trainers.__main__ import SideError, main, ratios
from benchmarks.compare_trainers.profile import report
from benchmarks.compare_trainers.sides import (
    COMPILED,
    OWN,
    PAIRED,
    PEER,
    RING,
    Alternation,
    Settings,
)
from benchmarks.compare_trainers.stopwatch import RECORDED, Stopwatch
from ringfa3.hf import batch

TINY = Settings("tiny", 2048, 2, 3, recompute=False, fa3=None, device="cpu")
SMALL = ["--shape", "tiny", "--tokens", "2048", "--steps", "3"]
MACHINE = {"device": "CPU"}


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Longest first, each into the fullest sample that has room for it."""
    samples: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [sample for sample in samples if sum(sample) + length <= room]
        if not fitting:
            fitting = [[]]
            samples += fitting
        max(fitting, key=sum).append(length)
    return samples


@pytest.mark.parametrize(
    ("tokens", "ranks", "steps"), [(2048, 2, 3), (32768, 2, 10), (24576, 3, 2)]
)
def test_best_fit_packing_restores_full_samples_that_differ(
    tokens: int, ranks: int, steps: int
) -> None:
    settings = Settings("tiny", tokens, ranks, steps, recompute=False, fa3=None, device="cpu")
    samples = settings.lengths()
    assert len({tuple(sample) for sample in samples}) == len(samples) == settings.samples
    packed = best_fit([length for sample in samples for length in sample], tokens)
    assert sorted(packed) == sorted(samples)
    for sample in samples:
        assert sum(sample) == tokens
        assert all(length > 0 and length % (2 * ranks) == 0 for length in sample)
    assert [len(ids) for ids in settings.documents()] == [x for sample in samples for x in sample]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "2000"], "--tokens: 2000 tokens: they must be a multiple of 128"),
        (["--tokens", "1024"], "and at least 1536 for 3 steps on 2 ranks"),
        (["--ranks", "1"], "--ranks 1: it must be at least 2"),
        (["--sides", "ring", "rows"], "--sides rows: PyTorch's context parallelism needs GPUs"),
        (["--sides", "peer"], "--sides peer: it needs --fa3"),
        (["--profile"], "--profile: it shows kernels, and needs GPUs"),
        (["--fa3", "missing.so"], "--fa3 missing.so: no such file"),
    ],
)
def test_wrong_arguments_are_refused_before_a_side_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, *arguments])
    assert message in capsys.readouterr().err


def test_every_second_step_has_the_layout_and_the_attention_of_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ringfa3.hf import trainer

    monkeypatch.setattr(batch, "plan_context", batch.plan_context)  # restored after the test
    monkeypatch.setattr(trainer, "shard_batch", trainer.shard_batch)
    registered: list[str] = []
    monkeypatch.setattr(
        hf_ring_flash_attn, "register", lambda plan, device: registered.append(plan.layout)
    )
    alternation = Alternation(torch.device("cpu"))
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=""))
    ids = torch.arange(8)[None]
    for step, layout in enumerate(["zigzag", "contiguous"] * 2):
        alternation.begin(step, model)
        found = trainer.shard_batch({"input_ids": ids, "labels": ids}, None)
        assert found.plan.layout == layout
        theirs = layout == "contiguous"
        assert ("ringfa3_plan" in found.inputs) == (not theirs)
        wanted = hf_ring_flash_attn.NAME if theirs else "ringfa3"
        assert model.config._attn_implementation == wanted
    assert registered == ["contiguous"] * 2


def test_a_ratio_is_that_of_medians_and_of_pairs_for_alternating_steps() -> None:
    figures = {
        "ring": {"seconds": {RING: [1.0, 2.0, 4.0]}},
        "peer": {"seconds": {PAIRED: [2.0, 4.2, 8.0], PEER: [2.2, 4.2, 8.4]}},
        "own": {"seconds": {OWN: [9.0, 1.9, 1.0]}},
        "compiled": {"seconds": {COMPILED: [1.0, 1.0, 1.0]}},
        "errors": {"errors": {"RingFA3": 0.04, "sdpa": 0.05}},
    }
    values = {ratio.name.split(" of ")[1]: ratio.value for ratio in ratios(figures, judged=True)}
    assert values == pytest.approx(
        {OWN: 0.95, COMPILED: 0.5, PEER: 1.05, "gradients over that": 0.8}, rel=1e-12
    )


@pytest.mark.parametrize(
    ("theirs", "error", "missed"),
    [
        (0.95, 1.10, []),
        (0.94, 1.0, [OWN]),
        (1.0, 1.11, ["gradients over that"]),
        (1.0, math.nan, ["gradients over that"]),
    ],
)
def test_a_missed_bar_is_seen(theirs: float, error: float, missed: list[str]) -> None:
    """Steps of 1 s, and an error of 1. On CPUs the speed has no bar."""
    figures = {
        "ring": {"seconds": {RING: [1.0]}},
        "own": {"seconds": {OWN: [theirs], COMPILED: [0.1]}},
        "errors": {"errors": {"RingFA3": error, "sdpa": 1.0}},
    }
    found = ratios(figures, judged=True)
    assert [ratio.name.split(" of ")[1] for ratio in found if not ratio.right] == missed
    on_cpus = [ratio for ratio in ratios(figures, judged=False) if not ratio.right]
    assert [ratio.name.split(" of ")[1] for ratio in on_cpus] == [x for x in missed if x != OWN]


def test_a_side_that_fails_leaves_the_figures_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(side: str, *_: object) -> dict[str, Any]:
        if side == "own":
            raise SideError("own ended with exit code 1:\nits last line")
        return {"seconds": {RING: [1.0]}, "machine": MACHINE}

    monkeypatch.setattr(compare_trainers, "run", run)
    assert main([*SMALL, "--sides", "own", "ring", "--out", str(tmp_path)]) == 1
    assert "its last line" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "trainers.json").read_text())["sides"]) == ["ring"]


def event(cat: str, name: str, begin_ms: float, ms: float, id: int = 0, **args: Any) -> Any:
    times = {"ts": 1e3 * begin_ms, "dur": 1e3 * ms, "pid": 1, "tid": 1}
    return {"ph": "X", "cat": cat, "name": name, "args": {"External id": id, **args}, **times}


def test_a_profile_has_kernels_by_op_own_times_of_ops_and_gaps() -> None:
    """Milliseconds of one of two steps: every total is half of what the trace has."""
    shapes = {"Input Dims": [[2], [4, 8], []], "Input type": ["int", "float", "Scalar"]}
    lines = report(
        [
            {"ph": "M", "name": "process_name"},
            event("cpu_op", "aten::linear", 0, 10, 1),
            event("cpu_op", "aten::mm", 0, 6, 2, **shapes),
            event("cuda_runtime", "cudaLaunchKernel", 5, 1, 2),
            event("cpu_op", "aten::item", 26, 10, 3),
            event("kernel", "gemm", 5, 15, 2),
            event("kernel", "ncclDevKernel", 4, 22, 4),
            event("gpu_memcpy", "copy", 34, 2, 3),
            event("kernel", "gemm", 36, 9, 2),
        ]
    ).splitlines()
    assert lines[0] == "a recorded step 20.50 ms: idle 19.5%, in NCCL alone 17.1%"
    assert lines[1] == "kernels: 2 a step, 24.00 ms"
    assert [line.split() for line in lines[3:6]] == [
        ["12.00", "1", "aten::mm", "float", "[4,", "8]", "gemm"],
        ["11.00", "0", "-", "ncclDevKernel"],
        ["1.00", "0", "aten::item", "copy"],
    ]
    own = [line.split() for line in lines[9:13]]
    assert [(x[0], x[2]) for x in own] == [
        ("5.00", "aten::item"),
        ("2.50", "aten::mm"),
        ("2.00", "aten::linear"),
        ("0.50", "cudaLaunchKernel"),
    ]
    assert lines[14].split(";") == ["    8.00  aten::item 8.00", " from ncclDevKernel to copy"]
    assert len(lines) == 15
    with pytest.raises(ValueError, match="no kernels"):
        report([event("cpu_op", "aten::mm", 0, 6)])


def test_a_profile_is_printed_and_written_for_each_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(side: str, folder: Path, *_: object) -> dict[str, Any]:
        assert json.loads((folder / "settings.json").read_text())["profile"]
        trace = {"traceEvents": [event("kernel", f"kernel of {side}", 0, 2)]}
        (folder / "trace.json").write_text(json.dumps(trace))
        return {"seconds": {side: [0.25, 0.75, 9.0, 9.0, 9.0]}}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(compare_trainers, "run", run)
    assert main([*SMALL, "--profile", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for side in ("ring", "own"):
        text = (tmp_path / f"profile-{side}.txt").read_text()
        assert f"{side}: 500.0 ms a step" in text
        assert f"kernel of {side}" in text
        assert text in printed
    assert not (tmp_path / "trainers.json").exists()


def test_a_trace_has_the_last_steps(tmp_path: Path) -> None:
    watch = Stopwatch(6, trace=tmp_path / "trace.json")
    for step in range(6):
        torch.zeros(step + 1)
        watch.step_done()
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    made = [x["args"]["Concrete Inputs"][0] for x in trace if x["name"] == "aten::zeros"]
    assert made == ["[5]", "[6]"]
    assert len(made) == RECORDED
    assert len(watch.seconds(5)) == 5


@pytest.mark.soak
def test_a_whole_run_on_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each trainer checks that its samples are those of the settings. A broken side ends with 1."""
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "trainers.json").read_text())
    assert list(record["sides"]) == ["ring", "own", "errors"]
    for side, name in (("ring", RING), ("own", OWN)):
        seconds = record["sides"][side]["seconds"][name]
        assert len(seconds) == 3
        assert min(seconds) > 0
    assert "error of gradients over that of sdpa" in capsys.readouterr().out
    with pytest.raises(SideError, match="ring ended with exit code 1"):
        compare_trainers.run("ring", tmp_path, 2, 100)  # no settings.json
