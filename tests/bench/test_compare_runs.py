"""If this fails, groups of training runs are compared at other steps or settings than the table
names. Two groups of training runs: shared settings, means over steps, the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compare_runs


def finish_run(folder: Path, seed: int, loss: float) -> Path:
    """The files of a finished run of 12 steps whose loss at step i < 12 is `loss` + i."""
    folder.mkdir()
    lines = [
        {"step": i, "loss": loss + i, "grad_norm": 1.0, "tokens_per_s": 5.0, "skipped": 0}
        for i in range(1, 13)
    ]
    lines[11]["loss"] = None  # a step that was skipped
    config = {
        "run": {"dir": str(folder), "name": folder.name},
        "engine": {"name": "ddp"},
        "data": {"path": str(folder), "pattern": "*"},
        "train": {"seed": seed, "steps": 12},
    }
    summary = {"held_out_bytes": 9, "nats_per_byte": loss}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_groups_are_compared_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    losses = {"bf16-0": 1.0, "bf16-1": 1.2, "fp8-0": 1.21, "failed-0": 1.0, "failed-1": 1.0}
    for name, loss in losses.items():
        finish_run(tmp_path / name, int(name[-1]), loss)
    failed = tmp_path / "failed-0"
    (failed / "summary.json").unlink()
    lines = (failed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (failed / "metrics.jsonl").write_text("".join(lines[:7]))
    runs = [f"bf16={tmp_path}/bf16-*", f"fp8={tmp_path}/fp8-0", f"failed={tmp_path}/failed-*"]
    monkeypatch.setattr("sys.argv", ["compare_runs.py", *runs, "--out", str(tmp_path / "out")])
    compare_runs.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| bf16 | 1.0000 1.2000 | 1.1000 | 1.5870 | +0.00% | 18.18% |",
        "| fp8 | 1.2100 | 1.2100 | 1.7457 | +10.00% |  |",
        "| failed | ended at step 7 without a summary |  |  |  |  |",
    ]
    written = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert written["settings"] == {"engine.name": "ddp", "data.pattern": "*", "train.steps": 12}
    assert [run["config"] for run in written["kinds"]["bf16"]] == [
        {"train.seed": 0},
        {"train.seed": 1},
    ]
    assert written["kinds"]["fp8"][0]["last_step"] == [10, 12]
    assert written["kinds"]["fp8"][0]["loss"] == [pytest.approx(1.21 + 5.5), pytest.approx(12.21)]
    assert (tmp_path / "out" / "runs.png").exists()


def refusal(
    groups: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the program prints on stderr when it refuses these groups."""
    monkeypatch.setattr("sys.argv", ["compare_runs.py", *groups, "--out", "nowhere"])
    with pytest.raises(SystemExit):
        compare_runs.main()
    return capsys.readouterr().err


def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Folders without steps, texts of other lengths, a first group without a loss."""
    (tmp_path / "empty").mkdir()
    for started in (False, True):
        if started:
            (tmp_path / "empty" / "metrics.jsonl").touch()
        text = refusal([f"bf16={tmp_path}/empty"], monkeypatch, capsys)
        assert f"bf16={tmp_path}/empty: {tmp_path}/empty has no metrics.jsonl of a run" in text
    runs = [finish_run(tmp_path / name, 0, 1.0) for name in ("a", "b")]
    groups = [f"x={run}" for run in runs]
    summary = json.loads((runs[1] / "summary.json").read_text())
    (runs[1] / "summary.json").write_text(json.dumps({**summary, "held_out_bytes": 8}))
    assert "held-out texts have [8, 9] bytes" in refusal(groups, monkeypatch, capsys)
    (runs[0] / "summary.json").unlink()
    text = refusal(groups, monkeypatch, capsys)
    assert "a run of the first group has no summary.json" in text
