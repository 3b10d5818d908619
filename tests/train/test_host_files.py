"""If this fails, each process of a host does the work of all, and starts take long. Work that one
process of a host does for all, and what it costs: time, and memory in all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from train.config import ConfigError
from train.data import shards
from train.data.documents import COLUMNS, Documents, SplitWriter
from train.data.mixture import training_samples
from train.data.shards import open_corpus
from train.host import once, shared_array

ROOT = Path(__file__).absolute().parents[2]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of those that it starts."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "temporary"


def test_one_process_works_for_all_that_wait_and_later_ones_work_again():
    calls, results = [], []

    def work() -> str:
        calls.append(1)
        time.sleep(0.2)
        return f"result {len(calls)}"

    def ask() -> None:
        results.append(once("a name", work))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["result 1"] * 5
    assert once("a name", work) == "result 2"
    assert once("another", work) == "result 3"


def test_a_result_of_a_clock_that_was_ahead_is_not_used(temporary, monkeypatch):
    once("name", lambda: "old")
    (path,) = temporary.glob("*/*.json")
    path.write_text(json.dumps([time.time() + 1000, "old"]))
    assert once("name", lambda: "new") == "new"
    path.write_text("[1")
    assert once("name", lambda: "newer") == "newer"


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_another_process_does_the_work_of_one_that_dies(temporary):
    """It has written a part; the next process computes all of it."""
    code = (
        "import numpy as np, time; from train.host import shared_array\n"
        "def rows():\n"
        "    yield np.ones((9000, 3), np.int64)\n"
        "    print('begun', flush=True); time.sleep(60)\n"
        "shared_array('order', 3, rows)"
    )
    dying = python(code)
    assert dying.stdout.readline() == "begun\n"
    found = []
    rows = np.arange(30, dtype=np.int64).reshape(-1, 3)
    waiting = threading.Thread(
        target=lambda: found.append(shared_array("order", 3, lambda: [rows]))
    )
    waiting.start()
    time.sleep(0.1)
    assert not found
    dying.send_signal(signal.SIGKILL)
    waiting.join(timeout=20)
    np.testing.assert_array_equal(found[0], rows)
    assert not list(temporary.glob("*/*.tmp"))


def test_a_full_disk_is_named(temporary):
    """Each process prints one line, with the variable that moves the folder."""

    def full() -> list[np.ndarray]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigError, match=r"TMPDIR: the folder .* \(No space left on device\)"):
        shared_array("order", 3, full)
    (temporary / f"ringfa3-{os.getuid()}").rename(temporary / "moved")
    (temporary / f"ringfa3-{os.getuid()}").write_text("a file")
    with pytest.raises(ConfigError, match=r"TMPDIR: the folder .* cannot be made"):
        once("a name", lambda: "result")


@pytest.mark.parametrize(
    "ask", [lambda: once("a", lambda: "result"), lambda: shared_array("a", 1, list)]
)
def test_a_lock_that_cannot_be_made_is_named(temporary, monkeypatch, ask):
    """Also a host without any folder for temporary files."""
    once("a", lambda: "result")
    for path in temporary.glob("*/*.json"):
        for lock in (path.with_suffix(".json.lock"), path.with_suffix(".rows.lock")):
            lock.unlink(missing_ok=True)
            lock.mkdir()
    with pytest.raises(ConfigError, match=r"^TMPDIR: the folder .* cannot be written to"):
        ask()
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(temporary / "missing")])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(ConfigError, match=r"^TMPDIR: .* cannot be made .*No usable temporary"):
        ask()


def test_an_array_outlives_its_removal(temporary):
    """Old arrays are removed when one is written; a process that has mapped one still has it."""
    old = shared_array("old", 2, lambda: [np.full((5, 2), 7)])
    (path,) = temporary.glob("*/*.rows")
    os.utime(path, (0, 0))
    shared_array("new", 1, lambda: [np.zeros((2, 1), np.int64), np.ones((1, 1), np.int64)])
    assert not path.exists()
    assert old.tolist() == [[7, 7]] * 5
    assert not old.flags.writeable
    again = shared_array("new", 1, lambda: pytest.fail("it is there"))
    assert again.ravel().tolist() == [0, 0, 1]


def test_a_corpus_is_verified_once_per_host(config, monkeypatch):
    """Those that ask at once wait for the first; damage that it finds is an error of all."""
    open_corpus(config.data)
    verify, calls = shards.verify, []

    def slow(*arguments: object) -> object:
        calls.append(1)
        time.sleep(0.3)
        return verify(*arguments)

    monkeypatch.setattr(shards, "verify", slow)
    errors: list[Exception] = []

    def opened() -> None:
        try:
            open_corpus(config.data)
        except Exception as error:
            errors.append(error)

    def at_once() -> None:
        threads = [threading.Thread(target=opened) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    at_once()
    assert (len(calls), errors) == (1, [])
    (folder,) = (path.parent for path in Path(config.data.cache_dir).glob("*/manifest.json"))
    content = (folder / "train" / "00000.bin").read_bytes()
    (folder / "train" / "00000.bin").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    at_once()
    assert len(calls) == 2
    assert [str(error) for error in errors] == [str(errors[0])] * 4
    assert f"differs from its checksum; delete {folder}" in str(errors[0])


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("max_doc_len", [None, 20])
def test_shared_samples_are_those_of_one_process(config, packing, max_doc_len):
    """With the index in memory and without a digest nothing is shared; equal in every bit."""
    data = config.data
    data.packing, data.max_doc_len, data.min_len, data.seq_len = packing, max_doc_len, 40, 64
    shared = open_corpus(data).train
    columns = {name: np.array(getattr(shared, name)) for name in COLUMNS}
    alone = Documents(**{**vars(shared), **columns, "digest": None})
    one, other = (training_samples(documents, data, seed=3) for documents in (shared, alone))
    for index in range(300):  # several epochs
        assert one.slices(index) == other.slices(index)


def write_index(folder: Path, count: int) -> None:
    """A split of ``count`` documents of 1 to 9 tokens, and one long one."""
    SplitWriter(folder, np.dtype(np.uint16)).close()
    lengths = np.arange(count) % 9 + 1
    lengths[count // 2] = 1000
    columns = dict.fromkeys(COLUMNS, np.zeros(count, np.int64))
    columns |= {"lengths": lengths, "start": np.cumsum(lengths) - lengths, "n_bytes": lengths}
    columns["hash"] = np.random.default_rng(0).permutation(count)
    np.savez(folder / "index.npz", **columns)
    with (folder / "00000.bin").open("wb") as file:
        file.truncate(2 * int(lengths.sum()))


RANK = """
import sys, tracemalloc
from pathlib import Path
from train.config import DataConfig
from train.data.documents import open_split
from train.data.mixture import training_samples
from train.data.samples import evaluation_documents

folder, packing, max_doc_len = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) or None
data = DataConfig(seq_len=1024, max_doc_len=max_doc_len, packing=packing)
size = (folder / "00000.bin").stat().st_size
tracemalloc.start()  # numpy's arrays too, and no memory that a file backs
documents = open_split(
    folder, [size], "uint16", 10, {"": ["a"]}, {"": 1.0}, digest="a", check=False
)
samples = training_samples(documents, data, seed=0)
for index in range(4):
    assert samples[index].tokens.sum() == 0
evaluation_documents(documents, 10_000)
print(*tracemalloc.get_traced_memory())
"""


@pytest.mark.parametrize(
    ("packing", "max_doc_len"), [("stream", 0), ("stream", 5), ("best_fit", 0)]
)
def test_a_document_takes_16_bytes_of_a_host(tmp_path, packing, max_doc_len):
    """Three ranks together: what they hold, and with the defaults also the sum of their peaks.

    A rank may have copies of some documents, of a number that does not grow with the corpus.
    """
    count, copies = (500_000 if packing == "stream" else 60_000), 2_000_000
    write_index(tmp_path / "train", count)
    ranks = [python(RANK, tmp_path / "train", packing, max_doc_len) for _ in range(3)]
    memory = [[int(size) for size in rank.communicate()[0].split()] for rank in ranks]
    held, peaks = (sum(sizes) for sizes in zip(*memory, strict=True))
    assert held <= 3 * copies
    if (packing, max_doc_len) == ("stream", 0):
        assert peaks <= 16 * count + 3 * copies


def test_a_thousand_documents_a_second_are_indexed(config, tmp_path):
    """Read, tokenised, written, verified and opened, on one core."""
    lines = (json.dumps({"text": f"document {number} of the ring"}) for number in range(5000))
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    config.data.path = str(tmp_path / "lines.jsonl")
    begin = time.process_time()
    assert len(open_corpus(config.data).train) > 3000
    assert time.process_time() - begin < 5
