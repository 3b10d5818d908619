"""The split of each document: training, held out, or neither.

The split follows from the text alone. A text that occurs twice, in one source or in two, is
therefore never in both splits.
"""

from __future__ import annotations

from train.config import ConfigError, DataConfig
from train.data.corpus import Document, is_held_out, sources_of

TRAIN, HELD_OUT = SPLITS = ("train", "held_out")


class Splitter:
    """Assigns documents to splits; those of ``data.validation_path`` must come first.

    ``copies`` counts the other documents whose text occurs there, ``without_loss`` those that were
    left out: they are in no split.
    """

    def __init__(self, data: DataConfig) -> None:
        self.data, self.copies, self.without_loss = data, 0, 0
        self._validation: set[int] = set()
        self._counts = {(s.name, split): 0 for s in sources_of(data) for split in SPLITS}

    def split(self, document: Document) -> tuple[str | None, int]:
        """The split of a document, None if it is a copy, and the hash of its text."""
        hashed = document.hash(self.data.held_out_salt)
        if document.file.source.validation:
            self._validation.add(hashed)
            return HELD_OUT, hashed
        if hashed in self._validation:
            self.copies += 1
            return None, hashed
        split = SPLITS[is_held_out(hashed, self.data.held_out)]
        self._counts[document.file.source.name, split] += 1
        return split, hashed

    def leave_out(self, document: Document) -> None:
        """Take a document without a token to learn out of its split again."""
        self.without_loss += 1
        hashed = document.hash(self.data.held_out_salt)
        if document.file.source.validation:
            self._validation.discard(hashed)
        else:
            split = SPLITS[is_held_out(hashed, self.data.held_out)]
            self._counts[document.file.source.name, split] -= 1

    def require_documents(self) -> None:
        """Raise ``ConfigError`` for an empty split of a source, or an empty validation set."""
        data = self.data
        if data.validation_path is not None and not self._validation:
            raise ConfigError(f"data.validation_path={data.validation_path} holds no text")
        for (source, split), count in self._counts.items():
            if count or (split == HELD_OUT and data.validation_path is not None):
                continue
            n = sum(self._counts[source, s] for s in SPLITS)
            of_source = f" of data.sources.{source}" if source else ""
            if data.validation_path is not None:
                raise ConfigError(
                    f"data.validation_path={data.validation_path} leaves the split "
                    f"train{of_source} empty: its documents are copies of documents there"
                )
            raise ConfigError(
                f"data.held_out={data.held_out} leaves the split {split}{of_source} empty ({n} "
                f"documents in all); add documents (a long file can be cut into several), change "
                f"the share or data.held_out_salt, or give data.validation_path"
            )
