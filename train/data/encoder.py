"""Documents -> tokens: BOS, a text, and EOS unless ``data.eos_token`` is ``none``.

A conversation has the tokens that its template gives it, and no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from train.config import ConfigError, DataConfig
from train.data.corpus import Document, document_name
from train.data.documents import DocumentError
from train.data.tokenizer import (
    SPECIAL_AS_TEXT,
    bos_id,
    encode,
    encode_with_offsets,
    special_names,
    vocabulary_size,
)
from train.sections.data import NO_EOS
from train.text.chat import HIDDEN, ChatTemplate, read_template
from train.text.token_ids import IdDecoder

T = TypeVar("T")
BATCH_DOCUMENTS = 64
# What published tokenizers call the token that ends a document. The tokens that end a turn of a
# chat (<|eot_id|>, <|im_end|>) are not among them.
EOS_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek, with characters outside of ASCII
)


class Encoded(NamedTuple):
    """A document: its tokens, which of them have loss, (tokens,) bool, and the bytes of these.

    ``loss`` is None for a text: all of its tokens have loss, except the first.
    """

    ids: list[int]
    loss: NDArray[np.bool_] | None
    n_bytes: int

    @property
    def has_loss(self) -> bool:
        """Whether any token has loss."""
        return self.loss is None or bool(self.loss.any())


class DocumentEncoder:
    """Encodes documents with the settings ``data``. ``eos`` is None if no token ends a document.

    ``decoder`` decodes documents that another program has encoded with this tokenizer.

    Raises ``ConfigError`` if the tokenizer lacks one of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer, data: DataConfig) -> None:
        self.tokenizer, self.data = tokenizer, data
        self.bos = bos_id(tokenizer, data.bos_token)
        self.eos_token = _eos_name(tokenizer, data)
        name = self.eos_token
        self.eos = None if name is None else int(tokenizer.token_to_id(name))
        self.decoder = IdDecoder(tokenizer, vocabulary_size(tokenizer), self.bos, self.eos)

    def texts(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without BOS and EOS."""
        return encode(self.tokenizer, texts, self.data.special_tokens)

    def documents(self, documents: list[Document]) -> list[Encoded]:
        """Each whole document. It has no loss if the assistant writes nothing.

        Raises ``ConfigError``, which names the document, if the template cannot render a
        conversation, or if a conversation does not end with ``data.eos_token``.
        """
        bodies = iter(self.texts([d.text for d in documents if d.is_text]))
        return [
            self._text(next(bodies), document.n_bytes)
            if document.is_text
            else self._other(document)
            for document in documents
        ]

    def stream(
        self, documents: Iterable[tuple[Document, T]]
    ) -> Iterator[tuple[Document, T, Encoded]]:
        """``documents`` of the pairs, which are read ``BATCH_DOCUMENTS`` at a time.

        Raises ``DocumentError``, which names the document, if the tokenizer refuses a text.
        """
        pairs = iter(documents)
        while batch := list(islice(pairs, BATCH_DOCUMENTS)):
            encoded = self._named([document for document, _ in batch])
            for (document, other), one in zip(batch, encoded, strict=True):
                yield document, other, one

    def _named(self, batch: list[Document]) -> list[Encoded]:
        try:
            return self.documents(batch)
        except ConfigError:
            raise
        except Exception:  # tokenizers raises no narrower type, and does not name the text
            for document in batch:
                try:
                    self.documents([document])
                except Exception as error:
                    name = document_name(document.file.label, document.row)
                    raise DocumentError(name, f"cannot be tokenised: {error}") from error
            raise

    def _text(self, body: list[int], n_bytes: int) -> Encoded:
        return Encoded([self.bos, *body, *self._end], None, n_bytes)

    @property
    def _end(self) -> list[int]:
        return [] if self.eos is None else [self.eos]

    def _other(self, document: Document) -> Encoded:
        """Token ids, a conversation, or a prompt and its completion."""
        if document.ids is not None:
            return self._text(document.ids.tolist(), document.n_bytes)
        record = json.loads(document.text)
        if isinstance(record.get("prompt"), str):
            return self._completion(**record)
        if self.data.special_tokens == SPECIAL_AS_TEXT:  # the template alone writes special tokens
            record = json.loads(self._special.sub(_hide, document.text))
        try:
            return self._conversation(*self.template.render(record))
        except ConfigError as error:
            name = document_name(str(document.file.path), document.row)
            raise ConfigError(f"{name}: {error}") from None

    def _completion(self, prompt: str, completion: str, **_: Any) -> Encoded:
        """Each is encoded on its own: a model that completes a prompt sees the prompt's tokens."""
        before, after = self.texts([prompt, completion])
        ids = [self.bos, *before, *after, *self._end]
        loss = (np.arange(len(ids)) > len(before)) & bool(completion)
        return Encoded(ids, loss, len(completion.encode()))

    def _conversation(self, text: str, spans: list[tuple[int, int]]) -> Encoded:
        # The tokenizer takes either all names of special tokens for text or none. If a text has
        # names with HIDDEN, it gets the parts between the template's own, at odd numbers, alone.
        hides = HIDDEN in text
        ids, offsets, length = [], [], 0
        for number, part in enumerate(self._special.split(text) if hides else [text]):
            part = part.replace(HIDDEN, "")
            new, within = encode_with_offsets(self.tokenizer, part, hides and number % 2 == 0)
            ids += new
            offsets += [(length + begin, length + end) for begin, end in within]
            length += len(part)
        spans = [(a - text.count(HIDDEN, 0, a), b - text.count(HIDDEN, 0, b)) for a, b in spans]
        text = text.replace(HIDDEN, "")
        begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        loss = np.zeros(len(ids), bool)
        for start, stop in spans:
            last = (begins < stop) & (ends > start)
            loss |= last
        if loss.any() and self.eos not in (None, *np.array(ids)[last].tolist()):
            raise ConfigError(
                f"the assistant's last text with loss, {text[start:stop][-40:]!r}, has no "
                f"data.eos_token={self.eos_token}: no model would learn to end an answer; give the "
                f"token that ends a message in the chat template, or data.eos_token={NO_EOS}"
            )
        return Encoded(ids, loss, sum(len(text[start:stop].encode()) for start, stop in spans))

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches the name of any special token, as a group; the longest name first."""
        names = [name for name in special_names(self.tokenizer) if len(name) > 1]
        longest = sorted(names, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")

    @cached_property
    def template(self) -> ChatTemplate:
        """The template of conversations; ``ConfigError`` if there is none, or if it is no Jinja."""
        source = read_template(self.data)
        if source is None:
            raise ConfigError(
                f"data.tokenizer={self.data.tokenizer} has no chat template in its folder "
                f"(chat_template.jinja or tokenizer_config.json); give data.chat_template=PATH"
            )
        special = {"bos_token": self.data.bos_token}
        if self.eos_token is not None:
            special["eos_token"] = self.eos_token
        return ChatTemplate(source, special)


def _hide(name: re.Match[str]) -> str:
    return f"{name[0][0]}{HIDDEN}{name[0][1:]}"


def trained_eos(data: DataConfig) -> str | None:
    """The EOS token of a tokenizer that is trained: ``bos_token`` serves for both by default."""
    if data.eos_token == NO_EOS:
        return None
    return data.bos_token if data.eos_token is None else data.eos_token


def _eos_name(tokenizer: Tokenizer, data: DataConfig) -> str | None:
    special = special_names(tokenizer)
    if data.tokenizer is None or data.eos_token is not None:
        name = trained_eos(data)
        if name is None or name in special:
            return name
        raise ConfigError(
            f"data.eos_token={name} is not a special token of data.tokenizer; choose one of "
            f"{', '.join(special) or 'none'}, or data.eos_token={NO_EOS}, with which no model "
            f"learns to end a document"
        )
    known = [name for name in special if name in EOS_NAMES]
    if len(known) != 1:
        found = f"several, {', '.join(known)}" if known else "none with a known name"
        raise ConfigError(
            f"data.eos_token=null takes the token that ends a document from data.tokenizer="
            f"{data.tokenizer}, which has {found}; choose one of its special tokens "
            f"({', '.join(special) or 'none'}), or data.eos_token={NO_EOS}, with which no model "
            f"learns to end a document"
        )
    return known[0]
