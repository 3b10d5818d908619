"""If this fails, `python -m ringfa3.bench attention` stops, or writes no results. The command,
`python -m ringfa3.bench attention`, on the CPU."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ringfa3 import Mask
from ringfa3.bench.__main__ import main
from ringfa3.bench.attention import run as attention
from ringfa3.bench.attention.cases import ABLATION, SINKS, SPANS, TREE
from ringfa3.bench.common import implementations, machine
from ringfa3.bench.common.cases import CAUSAL, Case, of_spans
from ringfa3.bench.common.comparison import DeviceLostError
from ringfa3.bench.common.machine import BenchError
from ringfa3.bench.common.problem import UnsupportedCaseError
from ringfa3.bench.common.results import Results, Row
from ringfa3.kernels import quantised_reference

SMALL = [
    Case("paper", "24 x 2", (24, 24), 4, 4, 64, CAUSAL),
    Case("masks", "2 documents", (20, 9), 4, 2, 64, CAUSAL, packed=True),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small cases instead of the sets."""
    monkeypatch.setattr(attention, "select", lambda *_: SMALL)


def run(*arguments: str | Path) -> int:
    return main(["attention", *map(str, arguments)])


def test_a_run_on_the_cpu_from_end_to_end(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run("--device", "cpu", "--set", "all", "--out", out) == 0
    printed = capsys.readouterr()
    assert "SMOKE RUN" in printed.out
    assert printed.out.splitlines()[-1].startswith(
        "SMOKE RUN, no kernel figures: RingFA3 fallback /"
    )
    assert len([x for x in printed.err.splitlines() if x.startswith(("forward", "backward"))]) == 4
    names = {f"{d}-{s}.png" for d in ("forward", "backward") for s in ("paper", "masks")}
    assert {path.name for path in out.iterdir()} == names | {"results.json", "table.txt"}
    found = Results.load(out / "results.json")
    assert found.complete
    assert found.smoke
    assert [(r.direction, r.set) for r in found.rows] == [
        ("forward", "paper"), ("forward", "masks"), ("backward", "paper"), ("backward", "masks"),
    ]  # fmt: skip
    assert [r.stopped for r in found.rows] == [None] * 4
    assert found.rows[0].comparisons["SDPA math"].ratio is not None
    assert found.machine["torch"] == torch.__version__
    assert len(found.machine["sources"]) == 16

    (out / "forward-paper.png").unlink()
    assert run("--plot-only", out / "results.json") == 0
    assert (out / "forward-paper.png").exists()

    assert run("--device", "cpu", "--out", out) == 2  # never over earlier results
    assert "has results already" in capsys.readouterr().err


def test_quiet_is_one_line(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--device", "cpu", "--direction", "fwd", "--out", tmp_path, "-q")
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    assert printed.err == ""


def test_the_default_folder_is_a_new_one(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run("--device", "cpu", "--direction", "fwd", "-q") == 0
    first, second = sorted((tmp_path / "runs/bench/attention").iterdir())
    assert first.name.startswith("cpu-smoke-20")
    assert first.name.endswith("-bf16")
    assert second.name == f"{first.name}-2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no CUDA GPU is visible; --device cpu tries the machinery"),
        (("--device", "cpu", "--pairs", "9"), "--pairs 9: an interval needs 10 or more"),
        (("--device", "cpu", "--fa3", "x.so"), "--fa3 needs a GPU"),
        (("--device", "cpu", "--set", "gqa", "--head-dim", "64"), "nothing to measure: no such"),
        (("--device", "cpu", "--shortest", "999999"), "nothing to measure: no such case"),
        (("--plot-only", "missing.json"), "--plot-only: [Errno 2]"),
        (("--device", "cpu", "--out", __file__), "--out"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(*arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert lines[0].startswith("ringfa3.bench: ")


@pytest.mark.parametrize(
    "arguments", [("--set", "mask"), ("--direction", "back"), ("--head-dim", "96")], ids=str
)
def test_a_wrong_value_is_named_with_the_allowed_ones(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_without_a_kernel_nothing_of_a_direction_is_measured(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"forward": None, "backward": "there are none"}
    monkeypatch.setattr(
        attention, "fallback_reason", lambda direction, *_, **__: reasons[direction]
    )
    options = attention.Options(["paper"], "bf16", [64], 0, "both", 10, None, "cuda", None, False)
    todo, left_out = attention.planned_rows(options, torch.device("meta"))
    assert [direction for _, direction in todo] == ["forward", "forward"]
    (line,) = left_out
    assert line.startswith(
        "backward at head dim 64: there are none, and the PyTorch fallback is not"
    )


def test_kernels_are_sought_by_the_head_dim_of_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fallback would be timed where only the wider kernel is there."""
    asked: list[tuple[int, int | None]] = []

    def reason(_: str, q: torch.Tensor, *__: object, v_dim: int | None = None) -> str:
        asked.append((q.shape[-1], v_dim))
        return "there is none"

    monkeypatch.setattr(attention, "fallback_reason", reason)
    monkeypatch.setattr(implementations, "fallback_reason", reason)
    options = attention.Options(["mla"], "bf16", [256], 0, "fwd", 10, None, "cuda", None, False)
    todo, _ = attention.planned_rows(options, torch.device("meta"))
    assert (todo, asked) == ([], [(192, 128)])
    problem: Any = SimpleNamespace(
        direction="forward", q=mock.MagicMock(), v=torch.empty(0, 1, 128)
    )
    problem.q.flatten.return_value = torch.empty(0, 1, 192)
    with pytest.raises(UnsupportedCaseError, match="there is none"):
        implementations.require_kernel(problem)
    assert asked[1:] == [(192, 128)]


@pytest.mark.parametrize("stopped", ["wrong: out is off", "failed: no"])
def test_wrong_results_and_failures_end_in_code_1(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    def measure_row(case: Case, direction: str, *_: object) -> Row:
        row = Row.of(case, direction, "bfloat16", ["RingFA3 fallback", "SDPA math"])
        row.stopped = stopped
        return row

    monkeypatch.setattr(attention, "measure_row", measure_row)
    assert run("--device", "cpu", "--out", tmp_path, "-q") == 1
    assert [row.stopped for row in Results.load(tmp_path / "results.json").rows] == [stopped] * 4


def test_a_lost_gpu_leaves_what_was_measured(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_row(case: Case, direction: str, *_: object) -> Row:
        row = Row.of(case, direction, "bfloat16", ["RingFA3 fallback", "SDPA math"])
        if case is SMALL[1]:
            lost = DeviceLostError("the GPU no longer answers: illegal access")
            row.stopped, lost.row = "failed: lost", row
            raise lost
        return row

    monkeypatch.setattr(attention, "measure_row", measure_row)
    assert run("--device", "cpu", "--out", tmp_path, "-q") == 1
    assert "the GPU no longer answers: illegal access" in capsys.readouterr().err
    found = Results.load(tmp_path / "results.json")
    assert not found.complete
    assert [row.stopped for row in found.rows] == [None, "failed: lost"]


def test_clocks_are_read_under_either_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script stands in for nvidia-smi of an older driver, which knows throttle reasons alone."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$*" in *event_reasons*) echo "no valid field"; exit 2;; esac\n'
        'echo "NVIDIA H200, 550.1, 1755 MHz, 3201 MHz, 1980 MHz, 690 W, 700 W, 61, 0x4"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    found = machine.clocks(torch.device("cuda"))
    assert found["clocks.sm"] == "1755 MHz"
    assert found["power.draw"] == "690 W"
    assert found["clocks_throttle_reasons.active"] == "0x4"
    script.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert machine.clocks(torch.device("cuda")) == {"error": "nvidia-smi: no driver"}
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "nvidia-smi" in machine.clocks(torch.device("cuda"))["error"]


def test_a_commit_is_that_of_the_checkout_itself(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    assert machine.git_commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "inside").mkdir()
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    commit = machine.git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 12
    assert machine.git_commit(tmp_path / "inside") is None  # installed inside another checkout
    (tmp_path / "file").write_text("b")
    assert machine.git_commit(tmp_path) == f"{commit}+"


@pytest.mark.parametrize("name", [ABLATION, SINKS, SPANS])
def test_on_a_gpu_sets_with_implementations_of_their_own_take_no_other(name: str) -> None:
    options: Any = SimpleNamespace(fa3=Path("x.so"), fa4=None)
    with pytest.raises(BenchError, match=f"^--fa3 is not used by --set {name}$"):
        attention._with_own_implementations(name, torch.device("cuda"), options)


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    text = capsys.readouterr().out
    for option in ("--set", "--dtype", "--head-dim", "--direction", "--pairs", "--fa3", "--out"):
        assert option in text
    assert "http" not in text


@pytest.mark.parametrize(
    ("sets", "more", "message"),
    [
        (["ablation"], [], "--set ablation compiles kernels: it needs a GPU"),
        (["sinks", "paper"], [], "--set sinks has its own implementations: give no other"),
        (["deterministic"], ["--fa3", "x.so"], "--fa3 is not used by --set deterministic on the"),
        (["deterministic"], ["--direction", "fwd"], "nothing to measure: no such case"),
    ],
    ids=str,
)
def test_sets_of_ringfa3_against_itself_stand_alone(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sets: list[str],
    more: list[str],
    message: str,
) -> None:
    assert run("--device", "cpu", "--set", *sets, *more, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_ablation_says_where_its_kernels_are_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a wheel: one line, with what to do."""
    monkeypatch.setattr("ringfa3.bench.attention.run.ablation_folder", lambda: tmp_path / "absent")
    assert run("--device", "cpu", "--set", "ablation", "--out", tmp_path / "out") == 2
    printed = capsys.readouterr().err.strip()
    assert "which does not exist: run it from a checkout of the repository" in printed
    assert "\n" not in printed


@pytest.mark.parametrize(
    ("name", "direction", "names"),
    [
        ("deterministic", "backward", ["RingFA3 deterministic", "RingFA3"]),
        ("below", "backward", ["RingFA3", "RingFA3 at the kernel's head dim"]),
        ("sinks", "backward", ["RingFA3 with a sink", "RingFA3"]),
        ("int8-backward", "backward", ["RingFA3 int8", "RingFA3"]),
        ("mqa", "forward", ["RingFA3 fallback", "SDPA math", "SDPA flash"]),
        ("hops", "backward", ["RingFA3 fallback", "SDPA math", "SDPA flash"]),
    ],
)
def test_sets_on_the_cpu_from_end_to_end(
    tmp_path: Path, name: str, direction: str, names: list[str]
) -> None:
    arguments = ("--device", "cpu", "--set", name, "--head-dim", "64", "128", "-q")
    assert run(*arguments, "--direction", direction[0] + "wd", "--out", tmp_path) == 0
    found = Results.load(tmp_path / "results.json")
    assert found.rows
    for row in found.rows:
        assert (row.direction, row.implementations, row.stopped) == (direction, names, None)
        assert all(row.comparisons[peer].ratio is not None for peer in names[1:])
        assert row.keys == ([16] if name == "hops" else None)
    assert (tmp_path / f"{direction}-{name}.png").exists()
    notes = [line for line in found.left_out if line.startswith("cuDNN: ")]
    assert bool(notes) is (name == "deterministic")


def test_masks_of_spans_on_the_cpu_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a sequence of equal FLOPs; and trees against their sequences and FlexAttention."""
    mask = Mask.tree([12, 5, 9], [-1, 0, 0])
    for name, names in (
        (SPANS, ["RingFA3 without spans"]),
        (TREE, ["RingFA3 unfolded", "FlexAttention"]),
    ):
        case = replace(of_spans(name, "any", mask), heads=4, kv_heads=2, head_dim=64)
        monkeypatch.setattr(attention, "select", lambda *_, case=case: [case])
        assert run("--device", "cpu", "--set", name, "-q", "--out", tmp_path / name) == 0
        for row in Results.load(tmp_path / name / "results.json").rows:
            assert (row.stopped, list(row.comparisons)) == (None, names)
            timed = [row.comparisons[peer].ratio is not None for peer in names]
            assert timed == [True, row.direction == "forward"][: len(names)]


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_outputs_in_8_bits_are_timed_if_they_are_right(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """The kernel alone, with quantisation and beside bfloat16; with 1.25 times every output."""
    names = [f"RingFA3 {precision}", f"RingFA3 {precision} with quantisation", "RingFA3"]
    arguments = ("--device", "cpu", "--set", precision, "--direction", "fwd", "-q", "--out")
    assert run(*arguments, tmp_path / "right") == 0
    for row in Results.load(tmp_path / "right" / "results.json").rows:
        assert (row.implementations, row.stopped) == (names, None)
        assert all(row.comparisons[peer].ratio is not None for peer in names[1:])
    attend = quantised_reference.attend

    def wrong(*args: Any, **more: Any) -> None:
        attend(*args, **more)
        args[4].mul_(1.25)

    monkeypatch.setattr(quantised_reference, "attend", wrong)
    assert run(*arguments, tmp_path / "wrong") == 1
    for row in Results.load(tmp_path / "wrong" / "results.json").rows:
        assert row.stopped is not None
        assert row.stopped.startswith("wrong: out has an rms error of 2")
