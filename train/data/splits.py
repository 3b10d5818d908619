"""The split of each document: training, held out, or neither.

The split follows from the text alone. A text that occurs twice, in one source or in two, is
therefore never in both splits.
"""

from __future__ import annotations

from train.config import ConfigError, DataConfig
from train.data.corpus import Document, is_held_out, sources_of
from train.text.files import LeftOut

TRAIN, HELD_OUT = SPLITS = ("train", "held_out")


class EmptySplitError(ConfigError):
    """A split of a source, or the validation set, has no document."""


class DocumentSplits:
    """Assigns documents to splits; those of ``data.validation_path`` must come first.

    ``copies`` counts the other documents of each source whose text occurs there: they are in no
    split.
    """

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self._validation: set[int] = set()
        names = [source.name for source in sources_of(data)]
        self.copies = dict.fromkeys(names, 0)
        self._counts = {(name, split): 0 for name in names for split in SPLITS}

    def assign(self, document: Document) -> tuple[str | None, int]:
        """The split of a document, None if it is a copy, and the hash of its text."""
        hashed, source = document.hash(self.data.held_out_salt), document.file.source
        if source.validation:
            self._validation.add(hashed)
            return HELD_OUT, hashed
        if hashed in self._validation:
            self.copies[source.name] += 1
            return None, hashed
        split = SPLITS[is_held_out(hashed, self.data.held_out)]
        self._counts[source.name, split] += 1
        return split, hashed

    def leave_out(self, document: Document, split: str, hashed: int) -> None:
        """Take a document, of which nothing has loss, out of the ``split`` of ``assign`` again."""
        source = document.file.source
        if source.validation:
            self._validation.discard(hashed)
        else:
            self._counts[source.name, split] -= 1

    def require_documents(self, left_out: LeftOut) -> None:
        """Raise ``EmptySplitError`` for an empty split of a source, or an empty validation set.

        The message lists what is ``left_out``.
        """
        problem = self._problem()
        if problem is not None:
            raise EmptySplitError("; ".join([problem, *left_out.lines()]))

    def _problem(self) -> str | None:
        data, own_set = self.data, f"data.validation_path={self.data.validation_path}"
        if data.validation_path is not None and not self._validation:
            return f"{own_set} holds no text"
        for (source, split), count in self._counts.items():
            if count or (split == HELD_OUT and data.validation_path is not None):
                continue
            of_source = f" of data.sources.{source}" if source else ""
            if self.copies[source]:
                return (
                    f"{own_set} leaves the split {split}{of_source} empty: its documents "
                    f"({self.copies[source]:,}) are copies of documents there"
                )
            n = sum(self._counts[source, s] for s in SPLITS)
            if not n:
                path = data.sources[source].path if source else data.path
                return f"data.{f'sources.{source}.' if source else ''}path={path} holds no text"
            return (
                f"data.held_out={data.held_out} leaves the split {split}{of_source} empty ({n} "
                f"documents in all); add documents, cut long files with data.split_on or "
                f"data.split_bytes, change the share or data.held_out_salt, or give "
                f"data.validation_path"
            )
        return None
