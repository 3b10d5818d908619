"""If this fails, held-out losses are those of other documents. The splits of documents, and the
errors for a split without documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.config import DataConfig
from train.data.corpus import Document, Source, TextFile, sources_of
from train.data.splits import HELD_OUT, TRAIN, DocumentSplits, EmptySplitError
from train.sections.data import SourceConfig
from train.text.files import LeftOut
from train.text.reading import Reading

OWN = Source("", "v", "*", 1.0, Reading(path_key="data.validation_path"), validation=True)


def data_of(**keys) -> DataConfig:
    sources = {name: SourceConfig(path=name) for name in ("a", "b")}
    return DataConfig(path=None, sources=sources, **keys)


def assign(splits: DocumentSplits, source: Source, *texts: str) -> list[str | None]:
    file = TextFile(source, Path("x"), "x")
    return [splits.assign(Document(file, 0, text, len(text)))[0] for text in texts]


def test_copies_are_counted_by_source():
    data = data_of(held_out=0.0, validation_path="v")
    splits, (a, b) = DocumentSplits(data), sources_of(data)
    assert assign(splits, OWN, "one", "two", "one") == [HELD_OUT] * 3
    assert assign(splits, a, "two", "three", "two") == [None, TRAIN, None]
    assert assign(splits, b, "four") == [TRAIN]
    assert splits.copies == {"a": 2, "b": 0}
    splits.require_documents(LeftOut())


def test_copies_are_blamed_for_an_empty_split_only_where_they_are_the_cause():
    """Source b has copies alone; a has no text at all, and something that is left out."""
    data = data_of(held_out=0.0, validation_path="v")
    splits, (a, b) = DocumentSplits(data), sources_of(data)
    with pytest.raises(EmptySplitError, match=r"^data\.validation_path=v holds no text$"):
        splits.require_documents(LeftOut())
    assign(splits, OWN, "one")
    assign(splits, b, "one", "one")
    left_out = LeftOut([("data.sources.a.path", "UTF-16", 3, ["x.txt"])])
    with pytest.raises(EmptySplitError) as caught:
        splits.require_documents(left_out)
    assert str(caught.value) == (
        "data.sources.a.path=a holds no text; data.sources.a.path: 3 left out (x.txt, ...): UTF-16"
    )
    assign(splits, a, "two")
    with pytest.raises(EmptySplitError) as caught:
        splits.require_documents(LeftOut())
    assert str(caught.value) == (
        "data.validation_path=v leaves the split train of data.sources.b empty: its documents (2) "
        "are copies of documents there"
    )


def test_documents_without_loss_are_in_no_split():
    data = data_of(held_out=0.0, validation_path="v")
    splits, (a, b) = DocumentSplits(data), sources_of(data)
    documents = {
        source.path: Document(TextFile(source, Path("x"), "x"), 0, source.path, 1)
        for source in (OWN, a, b)
    }
    assigned = {path: splits.assign(document) for path, document in documents.items()}
    splits.require_documents(LeftOut())
    for path, key in (("b", "sources.b.path"), ("v", "validation_path")):
        splits.leave_out(documents[path], *assigned[path])
        with pytest.raises(EmptySplitError, match=rf"^data\.{key}={path} holds no text$"):
            splits.require_documents(LeftOut())


def test_a_share_that_leaves_a_split_empty_is_named():
    data = data_of(held_out=1e-9)
    splits = DocumentSplits(data)
    assign(splits, sources_of(data)[0], "one")
    with pytest.raises(
        EmptySplitError,
        match=r"^data\.held_out=1e-09 leaves the split held_out of "
        r"data\.sources\.a empty \(1 documents in all\); .*data\.split_on",
    ):
        splits.require_documents(LeftOut())
