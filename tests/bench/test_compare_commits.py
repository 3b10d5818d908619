"""If this fails, `make speed` compares other code, kernels or times than its table names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import compare_commits
from benchmarks.compare_commits import ROOT, Side, SpeedError, base_side, in_turns, lines


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a file in each folder of code, and others."""
    for name in (*compare_commits.CODE, "docs"):
        (tmp_path / "checkout" / name).mkdir(parents=True)
        (tmp_path / "checkout" / name / "file").write_text(name)
    return tmp_path / "checkout"


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_machine_without_a_hopper_gpu_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"needs a Hopper GPU .*, 2 for a ring, and there is none"):
        compare_commits.main(["HEAD"])


def test_base_is_a_folder(checkout: Path, into: Path) -> None:
    """Its kernels are those of a folder, or of the environment."""
    code = {"ringfa3/file", "csrc/file", "train/file", "configs/file"}
    cache = checkout / "docs"
    assert base_side(str(checkout), cache, into) == Side(str(checkout), into, cache)
    assert files(into) == code


def test_base_is_a_commit(checkout: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("init", "add .", "-c user.name=a -c user.email=a commit -m first"):
        subprocess.run(["git", *command.split()], cwd=checkout, check=True, capture_output=True)
    (checkout / "train" / "file").write_text("changed since")
    monkeypatch.setattr(compare_commits, "ROOT", checkout)
    assert base_side("HEAD", None, into) == Side("HEAD", into, None)
    assert (into / "train" / "file").read_text() == "train"
    with pytest.raises(SpeedError, match=r"BASE=nothing is no commit of this clone .*nothing"):
        base_side("nothing", None, into)


def test_kernels_come_from_a_wheel(checkout: Path, tmp_path: Path) -> None:
    """Its libraries alone: the code is that of BASE."""
    names = ("ringfa3/libraries/a/kernel.so", "ringfa3/file")
    for name, contents in (("full", names), ("empty", names[1:])):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            for file in contents:
                wheel.writestr(file, "of the wheel")
        (tmp_path / name).mkdir()
    (tmp_path / "torn.whl").write_text("no archive")
    base_side(str(checkout), tmp_path / "full.whl", tmp_path / "full")
    assert "ringfa3/libraries/a/kernel.so" in files(tmp_path / "full")
    assert (tmp_path / "full" / "ringfa3" / "file").read_text() == "ringfa3"
    for name, problem in (("empty", "no compiled kernels"), ("torn", "give a folder")):
        (tmp_path / f"{name}-tree").mkdir()
        with pytest.raises(SpeedError, match=problem):
            base_side(str(checkout), tmp_path / f"{name}.whl", tmp_path / f"{name}-tree" / "in")


def test_a_job_has_the_code_and_the_kernels_of_its_side(tmp_path: Path) -> None:
    show = "import os; open('found', 'w').write(os.environ['PYTHONPATH'] + os.environ[{0!r}])"
    side = Side("base", tmp_path / "tree", tmp_path / "cache")
    compare_commits.run(side, 1, ["-c", show.format("RINGFA3_CACHE")], tmp_path)
    assert (tmp_path / "found").read_text() == f"{tmp_path}/tree{tmp_path}/cache"
    with pytest.raises(SpeedError, match=r"base: .* exited with 3:\nwhy"):
        compare_commits.run(side, 1, ["-c", "print('why'); exit(3)"], tmp_path)


def test_sides_alternate() -> None:
    began = []

    def job(side: Side) -> dict[str, float]:
        began.append(side.name)
        return {"row": float(len(began))}

    sides = [Side(name, ROOT, None) for name in "AB"]
    base, now = in_turns(sides, job, 3)
    assert "".join(began) == "ABBAAB"
    assert [x["row"] for x in base] == [1, 4, 5]
    assert [x["row"] for x in now] == [2, 3, 6]


def test_ratios_are_those_of_pairs() -> None:
    """By hand: 4/2, 9/3, 10/10. The ratio of the medians would be 3."""
    base = [{"a": 4.0, "b": 1.0}, {"a": 9.0}, {"a": 10.0}]
    now = [{"a": 2.0}, {"a": 3.0}, {"a": 10.0, "c": 1.0}]
    assert lines(base, now) == [
        ("a", "9.000", "3.000", "2.000 (1.000 to 3.000)"),
        ("b", "", "", "timed on one side only"),
        ("c", "", "", "timed on one side only"),
    ]
    with pytest.raises(SpeedError, match=r"no row was timed on both sides, of \['a', 'b'\]"):
        lines([{"a": 1.0}], [{"b": 1.0}])


def test_rows_of_result_files(tmp_path: Path) -> None:
    """By hand: RingFA3 is the first of each comparison; rows without figures are left out."""
    row = {"set": "paper", "label": "16k", "mask": "full", "direction": "forward"}
    matches = {"FA3": {"seconds": [[0.001, 0.003], [1, 1]]}, "cuDNN": {"seconds": [[0.002], [1]]}}
    failed = {**row, "mask": "causal", "matches": {"FA3": {"seconds": [[], []]}}}
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"rows": [{**row, "matches": matches}, failed]}))
    assert compare_commits.rows(file) == {"paper 16k full forward": 2.0}


@pytest.mark.soak
def test_a_smoke_run() -> None:
    """Kernels, a ring of 2 and the trainer of this checkout, with itself."""
    command = [sys.executable, "-m", "benchmarks.compare_commits", str(ROOT)]
    options = ["--rounds", "1", "--device", "cpu"]
    environment = {**os.environ, "COLUMNS": "120"}
    ended = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    for row in ("paper 64 causal 16 128 backward", "lengths 64 causal 8 128 forward 2", "step of"):
        assert row in ended.stdout
    assert "one side" not in ended.stdout
