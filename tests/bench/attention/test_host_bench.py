"""If this fails, the published host times are those of another call. `python -m ringfa3.bench
attention --set host`, on the CPU: whose times it takes, and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ringfa3.bench.__main__ import main
from ringfa3.bench.attention import host
from ringfa3.bench.attention.host import HARNESS, PYTHON, SDPA, Contender, Options, Row
from ringfa3.bench.common.cases import CAUSAL, Case

CASE = Case("host", "8", (8,), 2, 2, 64, CAUSAL)
PAIRS = 10


def test_a_run_on_the_cpu_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each case and kind of call; SDPA takes part where it has the mask."""
    arguments = ("--device", "cpu", "--head-dim", "64", "--pairs", str(PAIRS), "--out")
    assert main(["attention", "--set", "host", *arguments, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "SMOKE RUN" in printed.splitlines()[-1]
    found = json.loads((tmp_path / host.FILE).read_text())
    assert found["smoke"]
    labels = ["16, causal", "16, window", "2 documents of 8"]
    assert [(r["label"], r["kind"]) for r in found["rows"]] == [
        (label, kind) for label in labels for kind in host.KINDS
    ]
    for row in found["rows"]:
        names = [PYTHON, SDPA, HARNESS] if "causal" in row["label"] else [PYTHON, HARNESS]
        assert list(row["microseconds"]) == names
        assert all(len(t) == PAIRS and min(t) > 0 for t in row["microseconds"].values())


def test_it_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "--set", "host", "paper", "--device", "cpu"]) == 2
    assert "--set host times the host only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--errors-only"], "supports neither --errors-only nor --fa4"),
        (["--fa3", "nowhere.so"], "--fa3 nowhere.so: FA3 runs on a GPU"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attention", "--set", "host", "--device", "cpu", *option]) == 2
    assert message in capsys.readouterr().err


def test_contenders_take_turns_and_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins before each of its samples; the first rounds do not count."""
    log: list[str] = []

    def contender(name: str) -> Contender:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            log.append(name)
            return q * k

        return Contender(name, attend, lambda: log.append(f"begin {name}"))

    samples = iter(range(100))

    def sample(call: object, device: torch.device) -> float:
        assert callable(call)
        call()
        return float(next(samples))

    monkeypatch.setattr(host, "_sample", sample)
    options = Options("bf16", [64], "both", 2, None, [], "cpu", None, True)
    row = Row("8", 64, host.KINDS[0])
    contenders = [contender("a"), contender("b")]
    host._measure(row, CASE, row.kind, contenders, torch.device("cpu"), options)
    rounds = host.WARM_UP + 2
    assert log == ["begin a", "begin b"] + ["begin a", "a", "begin b", "b"] * rounds
    first = 2 * host.WARM_UP
    assert row.microseconds == {"a": [first, first + 2], "b": [first + 1, first + 3]}
    assert row.medians() == {"a": first + 1, "b": first + 2}
