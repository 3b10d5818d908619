"""If this fails, a damaged corpus trains a model without an error. Tokenised splits: read as
written, rejected if the index is wrong, errors name the document."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from train.data.documents import DocumentError, Documents, SplitWriter, open_split
from train.data.manifest import DamagedError
from train.data.samples import TrainingSamples

TEXTS = [[1, 2, 3], [4], [], [5, 6, 7, 8], [1]]
FILES = {"books": ["x.txt", "deep/y.jsonl"], "code": ["z.py"]}
WEIGHTS = {"code": 3.0, "books": 1.0}


def reopen(folder: Path, dtype: str = "uint16", vocab_size: int = 10) -> Documents:
    sizes = [path.stat().st_size for path in sorted(folder.glob("*.bin"))]
    return open_split(folder, sizes, dtype, vocab_size, FILES, WEIGHTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """``TEXTS`` from three files of two sources, in three token files."""
    folder = tmp_path / "split"
    writer = SplitWriter(folder, np.dtype(np.uint16), shard_tokens=5)
    origins, rows = [0, 1, 1, 1, 2], [0, 1, 2, 7, 0]
    for ids, origin, row in zip(TEXTS, origins, rows, strict=True):
        writer.add([9, *ids], n_bytes=len(ids) + 1, origin=origin, row=row, hashed=7 * row)
    writer.close()
    assert len(writer) == 5
    return folder


def test_a_split_over_several_files_reads_as_one(folder):
    assert len(list(folder.glob("*.bin"))) == 3
    documents = reopen(folder)
    for number, ids in enumerate(TEXTS):
        assert documents.tokens(number, 0, 99).tolist() == [9, *ids]
    assert documents.tokens(3, 1, 3).tolist() == [5, 6]
    assert documents.tokens(3, 1, 3).dtype == np.int64


def test_every_document_has_a_name_and_a_source(folder):
    documents = reopen(folder)
    names = ["books/x.txt", "books/deep/y.jsonl:1", "books/deep/y.jsonl:2", "books/deep/y.jsonl:7"]
    assert [documents.name(number) for number in range(5)] == [*names, "code/z.py"]
    assert list(documents.sources.items()) == [("books", 1.0), ("code", 3.0)]
    assert documents.bounds == (0, 4, 5)
    books, code = (documents.of_source(number) for number in range(2))
    assert (len(books), len(code)) == (4, 1)
    assert code.tokens(0, 0, 99).tolist() == [9, 1]
    assert (code.name(0), code.sources, code.bounds) == ("code/z.py", {"code": 3.0}, (0, 1))


def test_tokens_are_read_from_any_thread(folder):
    documents, wrong = reopen(folder), []

    def read() -> None:
        for turn in range(300):
            if documents.tokens(turn % 5, 0, 99).tolist() != [9, *TEXTS[turn % 5]]:
                wrong.append(turn)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_file_cut_while_in_use_names_the_document(folder):
    """With a mapped file this would end the process with SIGBUS."""
    documents = reopen(folder)
    path = folder / "00001.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DocumentError, match=r"document books/deep/y\.jsonl:7: .*00001\.bin ends"):
        documents.tokens(3, 0, 99)
    with pytest.raises(DocumentError, match=r"y\.jsonl:7"):
        list(map(TrainingSamples(documents, 8, None, seed=0).__getitem__, range(3)))
    path.write_bytes(content)
    assert documents.tokens(3, 0, 99).tolist() == [9, 5, 6, 7, 8]


def test_a_token_file_that_vanished_names_the_document(folder):
    documents = reopen(folder)
    (folder / "00002.bin").unlink()
    with pytest.raises(DocumentError, match=r"document code/z\.py: .*No such file"):
        documents.tokens(4, 0, 99)


def test_a_token_outside_of_the_vocabulary_names_the_document(folder):
    documents = reopen(folder, vocab_size=8)
    with pytest.raises(DocumentError, match=r"y\.jsonl:7: token 8 is not in the vocabulary of 8"):
        documents.tokens(3, 1, 99)
    assert documents.tokens(3, 1, 4).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("shard", 3, "document 3 is in no token file"),
        ("shard", -1, "document 3 is in no token file"),
        ("start", -1, "document 3 starts outside"),
        ("start", 2**62, "document 3 starts outside"),
        ("lengths", 0, "document 3 ends outside"),
        ("lengths", 6, "document 3 ends outside"),
        ("lengths", 2**63 - 1, "document 3 ends outside"),
        ("n_bytes", 0, "document 3 has no bytes"),
        ("origin", 3, "document 3 is of no file"),
        ("origin", 0, "document 3 is out of the order"),
        ("row", -1, "document 3 is of no row"),
        ("hash", -1, "document 3 has no hash"),
    ],
)
def test_an_index_that_points_outside_is_rejected(folder, column, value, problem):
    with np.load(folder / "index.npz") as index:
        columns = dict(index)
    columns[column][3] = value
    np.savez(folder / "index.npz", **columns)
    with pytest.raises(DamagedError, match=problem) as raised:
        reopen(folder)
    assert raised.value.path == folder / "index.npz"


@pytest.mark.parametrize("how", ["missing", "dtype", "length", "shape", "empty", "absent", "text"])
def test_an_index_of_another_form_is_rejected(folder, how):
    path = folder / "index.npz"
    with np.load(path) as index:
        columns = dict(index)
    if how == "missing":
        del columns["row"]
    elif how == "dtype":
        columns["start"] = columns["start"].astype(np.float64)
    elif how == "length":
        columns["start"] = columns["start"][:-1]
    elif how == "shape":
        columns = {name: column[None] for name, column in columns.items()}
    elif how == "empty":
        columns = {name: column[:0] for name, column in columns.items()}
    np.savez(path, **columns)
    if how == "absent":
        path.unlink()
    elif how == "text":
        path.write_text("index")
    with pytest.raises(DamagedError, match=r"index\.npz (cannot be read|has \w+ of)"):
        reopen(folder)


def test_a_failed_read_of_an_index_is_no_damage(folder, monkeypatch):
    """The remedy of damage is to delete the corpus; a process may lack memory or file handles."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(np, "memmap", refused)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        reopen(folder)


class Trap:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("trap"),))


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_in_an_index_is_executed(folder, monkeypatch, tmp_path, whole):
    monkeypatch.chdir(tmp_path)
    if whole:
        (folder / "index.npz").write_bytes(pickle.dumps(Trap()))
    else:
        with np.load(folder / "index.npz") as index:
            columns = dict(index)
        np.savez(folder / "index.npz", **{**columns, "row": np.array([Trap()] * 5, object)})
    with pytest.raises(DamagedError, match=r"cannot be read|has row of object"):
        reopen(folder)
    assert not (tmp_path / "trap").exists()


def test_token_files_of_another_type_are_rejected(folder):
    with pytest.raises(DamagedError, match="tokens of type object"):
        reopen(folder, dtype="object")
    (folder / "00002.bin").write_bytes(b"abc")
    with pytest.raises(DamagedError, match=r"00002\.bin has 3 bytes, not a multiple of 2"):
        reopen(folder)
