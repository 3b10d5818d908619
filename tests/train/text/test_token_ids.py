"""If this fails, token ids of another program become other tokens. Token ids that another program
wrote: Megatron's files, ``.npy``, and lists in records."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from tests.train.text.megatron import write_megatron
from train.config import ConfigError
from train.data.tokenizer import train_tokenizer, vocabulary_size
from train.text import token_ids
from train.text.files import NotReadError
from train.text.formats import read_texts
from train.text.reading import Reading
from train.text.token_ids import IdDecoder

BOS, EOS = 0, 1
TEXTS = ["one ring", "λ", "keeps every token\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A BPE of 278 tokens with BOS 0 and EOS 1."""
    return train_tokenizer(TEXTS * 9, 300, "<s>", eos_token="</s>")


@pytest.fixture
def reading(tokenizer) -> Reading:
    return Reading(decoder=IdDecoder(tokenizer, vocabulary_size(tokenizer), BOS, EOS))


@pytest.fixture
def encoded(tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]


def texts_of(path: Path, reading: Reading) -> list[tuple]:
    return [(text.row, text.text, text.n_bytes) for text in read_texts(path, reading)]


EXPECTED = [(n, text, len(text.encode())) for n, text in enumerate(TEXTS, 1)]


@pytest.mark.parametrize("code", [3, 4, 5, 8])
@pytest.mark.parametrize("ends", [[], [EOS]])
@pytest.mark.parametrize("begins", [[], [BOS]])
def test_megatron_files_hold_the_documents(tmp_path, reading, encoded, code, ends, begins):
    """With and without BOS and EOS, of every width, and documents of several sequences."""
    sequences = [[*begins, *ids, *ends] for ids in encoded]
    path = write_megatron(tmp_path / "a.bin", sequences, [0, 1, 2, 3], code)
    assert texts_of(path, reading) == EXPECTED
    assert [t.ids.tolist() for t in read_texts(path, reading)] == encoded
    cut = [part for ids in sequences for part in (ids[:2], [], ids[2:])]
    assert texts_of(write_megatron(path, cut, [0, 3, 6, 9], code), reading) == EXPECTED
    joined = [(1, "".join(TEXTS[:2]), 10), (3, TEXTS[2], 18)]
    if not begins and not ends:
        path = write_megatron(path, encoded, [0, 2, 2, 3], code)  # the second document is empty
        assert texts_of(path, reading) == joined


def test_megatron_sequences_are_found_by_their_pointers(tmp_path, reading, encoded):
    path = write_megatron(tmp_path / "A.BIN", encoded[::-1], [0, 1, 2, 3])
    lengths = [len(ids) for ids in encoded]
    pointers = 4 * np.array([lengths[2] + lengths[1], lengths[2], 0], np.int64)
    changes = {"lengths": np.array(lengths, np.int32), "pointers": pointers}
    write_megatron(
        path, encoded[::-1], [0, 1, 2, 3], **{k: v.tobytes() for k, v in changes.items()}
    )
    path.with_suffix(".idx").rename(tmp_path / "A.IDX")
    assert texts_of(path, reading) == EXPECTED


def test_a_large_index_is_read_in_place(tmp_path, tokenizer):
    """Neither a document nor a sequence of it takes memory."""
    count = 200_000
    path = write_megatron(tmp_path / "a.bin", [[]] * count, range(count + 1))
    tracemalloc.start()
    try:
        documents = token_ids.megatron_documents(path)
        assert len(next(documents)) == 0
        assert tracemalloc.get_traced_memory()[1] < 12 * count
    finally:
        tracemalloc.stop()
    assert sum(1 for _ in documents) == count - 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": struct.pack("<Q", 2)}, "version 2 and dtype code 4"),
        ({"code": b"\x07"}, "version 1 and dtype code 7"),
        ({"sequences": struct.pack("<Q", 9)}, "not the .* of 9 sequences and 4 entries"),
        ({"modes": bytes(3)}, "bytes, not the"),
        ({"document_index": np.array([0, 1, 2, 2]).tobytes()}, "document index .* 0 to 3"),
        ({"document_index": np.array([0, 2, 1, 3]).tobytes()}, "document index .* 0 to 3"),
        ({"document_index": np.array([1, 2, 2, 3]).tobytes()}, "document index .* 0 to 3"),
        ({"document_index": b"", "documents": bytes(8)}, "document index .* 0 to 3"),
        ({"pointers": np.array([0, 4, 999]).tobytes()}, "at byte 999, where a.idx has sequence 2"),
        ({"pointers": np.array([0, -4, 0]).tobytes()}, "at byte -4, where a.idx has sequence 1"),
        ({"lengths": np.array([1, -1, 1], np.int32).tobytes()}, "no -1 ids at byte .*sequence 1"),
        ({"code": b"\x04", "sequences": b""}, "bytes"),
    ],
)
def test_a_damaged_index_is_refused_with_its_problem(tmp_path, reading, encoded, changes, problem):
    path = write_megatron(tmp_path / "a.bin", encoded, [0, 1, 2, 3], **changes)
    with pytest.raises(ConfigError, match=rf"^data\.path: \S+a\.bin .*{problem}"):
        texts_of(path, reading)


def test_a_truncated_bin_is_refused_and_one_without_index_left_out(tmp_path, reading, encoded):
    path = write_megatron(tmp_path / "a.bin", encoded, [0, 1, 2, 3])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"^data\.path: \S+a\.bin has no \d+ ids at byte"):
        texts_of(path, reading)
    for content in (b"MMIDIDX\0\0", b"TNTIDX\0\0" + bytes(99), b"MMID", b""):
        path.with_suffix(".idx").write_bytes(content)
        expected = ConfigError if content.startswith(b"MMIDIDX") else NotReadError
        with pytest.raises(expected, match=r"a\.idx has 9 bytes|without its \.idx of Megatron"):
            texts_of(path, reading)
    path.with_suffix(".idx").unlink()
    with pytest.raises(NotReadError, match=r"without its \.idx of Megatron"):
        texts_of(path, reading)


@pytest.mark.parametrize("dtype", ["uint16", "int64", ">i4", "uint64"])
@pytest.mark.parametrize("block", [1, 3, 2**22])
def test_the_documents_of_an_npy_end_with_eos_or_begin_with_bos(
    tmp_path, monkeypatch, reading, encoded, dtype, block
):
    monkeypatch.setattr(token_ids, "BLOCK", block)
    first, second, third = encoded
    for ids in (
        [*first, EOS, *second, EOS, *third],
        [*first, EOS, *second, EOS, *third, EOS],
        [BOS, *first, EOS, BOS, *second, EOS, BOS, *third, EOS],
        [*first, BOS, *second, BOS, *third],
    ):
        np.save(tmp_path / "a.npy", np.array(ids, dtype))
        assert [text for _, text, _ in texts_of(tmp_path / "a.npy", reading)] == TEXTS


def test_one_token_may_begin_and_end_documents_and_no_eos_is_no_end(tmp_path, tokenizer, encoded):
    first, second, _ = encoded
    one = Reading(decoder=IdDecoder(tokenizer, 278, BOS, BOS))
    none = Reading(decoder=IdDecoder(tokenizer, 278, BOS, None))
    path = tmp_path / "a.npy"
    np.save(path, np.array([BOS, *first, BOS, *second, BOS]))
    assert [text for _, text, _ in texts_of(path, one)] == TEXTS[:2]
    np.save(path, np.array([BOS, *first, EOS, BOS, *second, EOS]))
    assert [text for _, text, _ in texts_of(path, none)] == [f"{text}</s>" for text in TEXTS[:2]]
    for ids in ([], [BOS], [BOS, BOS, BOS]):
        np.save(path, np.array(ids, np.int32))
        assert texts_of(path, one) == []


@pytest.mark.parametrize(
    "array",
    [np.zeros((3, 4), int), np.zeros(3), np.array(3), np.array(["a"]), np.array([None, {}])],
    ids=["2 dims", "floats", "0 dims", "strings", "objects"],
)
def test_an_npy_of_anything_else_is_left_out(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(NotReadError, match="one dimension of integers"):
        texts_of(tmp_path / "a.npy", Reading())
    (tmp_path / "a.npy").write_bytes(b"no numpy")
    with pytest.raises(NotReadError, match="numpy cannot read"):
        texts_of(tmp_path / "a.npy", Reading())


def test_lists_of_ids_in_records(tmp_path, reading, encoded):
    """Their field or column is that of the text. A list may be empty or null."""
    lists = [[BOS, *encoded[0], EOS], [], encoded[1], None, encoded[2]]
    expected = [(n, text, size) for n, (_, text, size) in zip((1, 3, 5), EXPECTED, strict=True)]
    own = reading._replace(text_field="input_ids")
    lines = "".join(json.dumps({"input_ids": ids}) + "\n" for ids in lists)
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text(lines)
        assert texts_of(tmp_path / name, own) == expected
    for dtype in (pyarrow.uint16(), pyarrow.int64()):
        for list_of in (pyarrow.list_, pyarrow.large_list):
            table = pyarrow.table({"input_ids": pyarrow.array(lists, list_of(dtype))})
            pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
            assert texts_of(tmp_path / "a.parquet", own) == expected
    with pytest.raises(ConfigError, match=r"data\.text_field=text: .*it has: input_ids \(.*list"):
        texts_of(tmp_path / "a.parquet", reading)
    floats = pyarrow.table({"input_ids": [[1.0, 2.0]]})
    pyarrow.parquet.write_table(floats, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"strings or lists of token ids"):
        texts_of(tmp_path / "a.parquet", own)
    holes = pyarrow.table({"input_ids": pyarrow.array([[1, None]], pyarrow.list_(pyarrow.int32()))})
    pyarrow.parquet.write_table(holes, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet:1 has token id nan"):
        texts_of(tmp_path / "a.parquet", own)


@pytest.mark.parametrize(("wrong", "shown"), [(-1, "-1"), (278, "278"), (2**40, str(2**40))])
def test_an_id_that_the_tokenizer_does_not_have_is_refused(tmp_path, reading, wrong, shown):
    ids = [5, 6, wrong, 7]
    np.save(tmp_path / "a.npy", np.array([3, EOS, *ids]))
    (tmp_path / "a.jsonl").write_text(f'{{"text": [3]}}\n{{"text": {ids}}}')
    write_megatron(tmp_path / "a.bin", [[3], ids], [0, 1, 2], 5)
    for name in ("a.npy", "a.jsonl", "a.bin"):
        message = rf"^data\.path: \S+{name}:2 has token id {shown}, but .* ids 0 to 277; give the"
        with pytest.raises(ConfigError, match=message):
            texts_of(tmp_path / name, reading)


def test_ids_need_a_tokenizer_and_a_truncated_npy_is_refused(tmp_path, reading):
    np.save(tmp_path / "a.npy", np.arange(2, 99))
    (tmp_path / "a.jsonl").write_text('{"text": [3]}')
    write_megatron(tmp_path / "a.bin", [[3]], [0, 1])
    for name in ("a.npy", "a.jsonl", "a.bin"):
        with pytest.raises(
            ConfigError, match=rf"{name}\S* has token ids, and data\.tokenizer=null"
        ):
            texts_of(tmp_path / name, Reading())
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-9])
    with pytest.raises(ConfigError, match=r"a\.npy is truncated: it has 95 of 97 ids"):
        texts_of(tmp_path / "a.npy", reading)
