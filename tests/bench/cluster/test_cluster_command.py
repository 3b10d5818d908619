"""If this fails, `python -m ringfa3.bench cluster` stops, or writes a wrong table. `python -m
ringfa3.bench cluster`: files, table and errors."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ringfa3.bench.__main__ import main
from ringfa3.bench.cluster import run


def cluster(*arguments: str) -> int:
    return main(["cluster", *arguments])


def test_a_run_writes_json_a_table_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is at most 80 columns wide."""
    given = "--gpus", "2,4", "--gpus-per-host", "2", "--seeds", "2", "--layers", "3"
    assert cluster("--mix", "short1,tail2", *given, "--out", str(tmp_path)) == 0
    content = json.loads((tmp_path / "cluster.json").read_text())
    assert content["settings"]["layers"] == 3
    one, two = "symmetric", "two levels"
    always = ["direct", "flat ring", "Ulysses x ring", "static cp=1", "static cp=2"]
    expected = {(mix, 2, name) for mix in ("short1", "tail2") for name in (one, *always)}
    expected |= {(m, 4, n) for m in ("short1", "tail2") for n in (two, *always, "static cp=4")}
    rows = content["rows"]
    assert {(row["mix"], row["gpus"], row["strategy"]) for row in rows} == expected
    for row in rows:
        assert 1 <= row["step"] <= row["worst"]
        assert row["ms"] >= row["ideal_ms"]
        assert (row["nic_gb"] > 0) <= (row["gpus"] == 4)
    printed = capsys.readouterr().out
    table = (tmp_path / "table.txt").read_text()
    assert max(map(len, table.splitlines())) <= 80
    for name in (one, two, *always):
        assert name in table
    assert printed.count("step over ideal: ") == 4
    assert (tmp_path / "cluster.png").stat().st_size > 10_000
    assert cluster("--out", str(tmp_path)) == 2
    assert "has results already" in capsys.readouterr().err


def test_lengths_from_a_file(tmp_path: Path) -> None:
    """Text and .npy give the same figures. To 1e-12: a document of 1024 tokens has 36 blocks of
    128 x 128 scores, and two of them are the work of two GPUs."""
    (tmp_path / "own.txt").write_text("1024\n")
    np.save(tmp_path / "own.npy", np.array([1024], np.int32))
    found = []
    for number, name in enumerate(("own.txt", "own.npy")):
        out = tmp_path / str(number)
        given = "--lengths", str(tmp_path / name), "--tokens", "1024", "--gpus", "2", "--cp", "2"
        rates = "--forward", "1", "--backward", "1", "--layers", "3"
        assert cluster(*given, *rates, "--seeds", "1", "--out", str(out), "--quiet") == 0
        found.append(json.loads((out / "cluster.json").read_text()))
    assert found[0] == found[1]
    for row in found[0]["rows"]:
        ideal = 3 * 14 * 36 * 128 * 128 * 32 * 128 / 1e12  # layers, FLOPs of a product
        assert row["ideal_ms"] == pytest.approx(1e3 * ideal, rel=1e-12)
        assert (row["documents"], row["longest"]) == (2, 1024)


WRONG = {
    "--mix tall32": "unknown; give magi, tail, short, single, each with a number, as tail32",
    "--mix ,": "unknown; give magi",
    "--mix tail0": "give a whole number from 1 to",
    "--mix tail32 --tokens 4096": "give --mix tail",
    "--mix tail1048576": "are 2^31 or more: give fewer",
    "--mix tail --lengths x": "give one of them",
    "--lengths missing.txt": "No such file or directory: give a file",
    "--gpus 1": "give a whole number from 2 to 1024",
    "--gpus 8,x": "give a whole number from 2 to 1024",
    "--gpus 20": "cannot be full; give 16 or 24",
    "--gpus 8 --cp 3": "does not divide --gpus 8: give a divisor",
    "--heads 32:5": "5 KV heads must divide 32 heads, as in 32:8",
    "--head-dim 320": "give a whole number from 1 to 256",
    "--window -2": "give a whole number from -1 to",
    "--seeds 0": "give a whole number from 1 to 1000",
    "--nic 0": "give a number above 0",
    "--forward nan": "give a number above 0",
    "--message -1": "give a number from 0 on",
}


def test_a_wrong_option_is_one_line_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for given, remedy in WRONG.items():
        assert cluster(*given.split()) == 2, given
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        option, value = given.split()[-2:]
        assert remedy in line, given
        assert option in line or value in line, given
        assert printed.out == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10\nlong\n", "'long'"),
        ("", "no lengths: give one a line"),
        ("3 0", "lengths are 0 to 3"),
        ("4 99", "99 tokens do not fit 2 GPUs of 49: give more --gpus or --tokens"),
    ],
)
def test_a_file_without_lengths_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    assert cluster("--lengths", str(path), "--tokens", "49", "--gpus", "4,2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert reason in line


def test_a_file_that_is_no_array_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("", "8\n9\n"):
        path = tmp_path / "lengths.npy"
        path.write_text(text)
        assert cluster("--lengths", str(path)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "lengths.npy: no array of NumPy: give one length a line" in line


def test_without_matplotlib_figures_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(run, "draw", side_effect=ModuleNotFoundError("No module 'matplotlib'")):
        given = "--mix", "short1", "--gpus", "2", "--seeds", "1", "--out", str(tmp_path)
        assert cluster(*given) == 0
    printed = capsys.readouterr().out
    assert "no plot: No module 'matplotlib'; pip install 'ringfa3[bench]'" in printed
    assert "step over ideal: " in printed
