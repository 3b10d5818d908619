"""Lines survive a torn end, a resumed run and a disk that takes no more."""

from __future__ import annotations

import json
import math
import resource

import pytest

from train.json_lines import JsonLines, read_lines


def test_a_run_that_goes_on_has_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, 0)
    for step in (1, 2, 3, 4):
        lines.write({"step": step})
    lines.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # torn by a kill
    lines = JsonLines(path, 2)
    lines.write({"step": 3})
    assert [record["step"] for record in read_lines(path)] == [1, 2, 3]


def test_a_new_run_starts_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonLines(path, 0)
    assert path.read_text() == ""


def test_what_is_not_finite_is_null(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl", 0)
    lines.write({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }


@pytest.fixture
def file_limit():
    """Lets the test set how many bytes a file may have; the system then refuses as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_disk_refuses_is_written_later(tmp_path, file_limit):
    lines = JsonLines(tmp_path / "a.jsonl", 0)
    lines.write({"step": 1})
    file_limit(20)
    for step in (2, 3):
        lines.write({"step": step, "loss": 1.5})
        assert "a.jsonl: File too large" in lines.problem
    file_limit(resource.RLIM_INFINITY)
    lines.write({"step": 4})
    assert lines.problem is None
    assert [record["step"] for record in read_lines(tmp_path / "a.jsonl")] == [1, 2, 3, 4]
