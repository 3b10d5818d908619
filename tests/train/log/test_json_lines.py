"""If this fails, a resumed run loses or garbles its metrics. JSON lines after a torn end, a resumed
run and a full disk."""

from __future__ import annotations

import json
import math
import resource
import threading

import pytest

from train.log.json_lines import JsonLines, read_lines
from train.log.metrics import Recorder
from train.run.run_folder import RunFolder


def test_a_resumed_run_has_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, 0)
    for step in (1, 2, 3, 4):
        lines.write({"step": step})
    lines.close()
    with path.open("a") as file:
        file.write('\0\0\0\n{"step": 5, "lo')  # torn by a loss of power, and by a kill
    lines = JsonLines(path, 2)
    lines.write({"step": 3})
    assert [record["step"] for record in read_lines(path)] == [1, 2, 3]


def test_a_new_run_starts_empty(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonLines(path, 0)
    assert path.read_text() == ""


def test_numbers_that_are_not_finite_become_null(tmp_path):
    """At any depth."""
    lines = JsonLines(tmp_path / "a.jsonl", 0)
    lines.write(
        {"step": 1, "loss": math.nan, "by_source": {"a": -math.inf, "b": 2.5, "c": [math.nan, 1]}}
    )
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {
        "step": 1,
        "loss": None,
        "by_source": {"a": None, "b": 2.5, "c": [None, 1]},
    }


@pytest.fixture
def file_limit():
    """Sets the maximum size of a file; the system then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_that_a_full_disk_rejects_are_written_later(tmp_path, file_limit):
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


def steps_in(path) -> list[int]:
    return [record["step"] for record in read_lines(path)]


def test_close_writes_the_pending_lines_that_fit(tmp_path, file_limit):
    lines = JsonLines(tmp_path / "a.jsonl", 0)
    file_limit(15)
    for step in (1, 2, 3):
        lines.write({"step": step})  # the second is torn
    file_limit(resource.RLIM_INFINITY)
    lines.close()
    lines.close()
    assert lines.problem is None
    assert steps_in(tmp_path / "a.jsonl") == [1, 2, 3]


@pytest.mark.parametrize("room", [0, 15, 30])
def test_a_full_disk_does_not_prevent_a_roll_back(tmp_path, file_limit, room):
    """Three lines of twelve bytes; ``room`` for none, for one and a torn one, for two."""
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path, 0)
    file_limit(room)
    for step in (1, 2, 3):
        lines.write({"step": step})
    assert "a.jsonl: File too large" in lines.problem
    lines.drop_after(2)
    lines.write({"step": 3})
    lines.drop_after(1)
    assert (lines.problem is None) == (room >= 12)
    lines.write({"step": 2})
    file_limit(resource.RLIM_INFINITY)
    lines.write({"step": 3})
    assert steps_in(path) == [1, 2, 3]


def test_no_step_is_written_twice_if_truncation_fails(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path, 0)
    for step in (1, 2, 3, 4):
        lines.write({"step": step})
    whole, lines._file = lines._file, Refusing()
    lines.drop_after(3)
    lines.write({"step": 4})
    lines.drop_after(2)
    assert lines.problem == f"{path}: No space left on device"
    lines.write({"step": 3})
    assert steps_in(path) == [1, 2, 3, 4]  # still the old file
    lines._file = whole
    lines.write({"step": 4})
    assert lines.problem is None
    assert path.read_text().count('"step": 3') == 1
    assert steps_in(path) == [1, 2, 3, 4]


class Refusing:
    """A file on a disk that rejects every write."""

    closed = False

    def write(self, _: object) -> int:
        raise OSError(28, "No space left on device")

    truncate = write


def test_lines_after_a_removed_one_are_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 5, 2, 6, 3)))
    JsonLines(path, 4)
    assert steps_in(path) == [1, 2, 3]


def test_threads_write_whole_lines(tmp_path):
    """Slices of a line could interleave if a write accepts only some of its bytes."""

    class Slow:
        """Accepts three bytes at a time, and lets other threads run."""

        closed = False

        def __init__(self, file) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            threading.Event().wait(1e-5)
            return self.file.write(data[:3])

    path = tmp_path / "a.jsonl"
    lines = JsonLines(path, 0)
    lines._file = Slow(lines._file)

    def write(thread: int) -> None:
        for number in range(20):
            lines.write({"step": 100 * thread + number})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps_in(path)) == [100 * t + n for t in range(3) for n in range(20)]


def test_a_recorder_rolls_back_on_a_full_disk(config, file_limit, monkeypatch):
    """Steps 1 to 3, back to 1, then 2 and 3 again; lines lost at the end are reported."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    messages: list[str] = []
    monkeypatch.setattr("train.log.metrics.SummaryWriter", refuse)
    folder = RunFolder(config)
    folder.path.mkdir()
    recorder = Recorder(folder, 0, messages.append)
    for step in (1, 2, 3):
        recorder.step({"step": step}, [1.0])
    size = folder.metrics.stat().st_size
    file_limit(size // 3)
    recorder.roll_back(1)
    recorder.step({"step": 2}, [1.0])
    recorder.event(2, "back")
    assert any("metrics.jsonl: File too large" in line for line in messages)
    assert messages.count("TensorBoard is off from step 2: [Errno 28] No space left on device") == 1
    file_limit(resource.RLIM_INFINITY)
    recorder.step({"step": 3}, [1.0])
    file_limit(size // 3)
    recorder.close()
    file_limit(resource.RLIM_INFINITY)
    assert steps_in(folder.metrics) == [1, 2, 3]
    assert any(line.endswith("the newest lines are not in the file") for line in messages)
