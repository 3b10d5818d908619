"""Byte-level BPE: train one, or load a ``tokenizer.json``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from train.config import ConfigError

# Training cuts longer pre-tokens (runs of letters, digits, signs or spaces): its time is quadratic
# in their length. Text without longer runs gives the same merges as without the cut.
LONGEST_PRE_TOKEN = 256  # bytes, for example 85 Chinese characters
PROGRESS_S = 10.0
SPECIAL_AS_TEXT = "text"  # the other value of data.special_tokens is "ids"
Log = Callable[[str], None]


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    bos_token: str,
    log: Log = lambda text: None,
    eos_token: str | None = None,
) -> Tokenizer:
    """Train a BPE over bytes with at most ``vocab_size`` tokens; ``bos_token`` gets id 0.

    ``eos_token``, unless it is None or ``bos_token``, gets id 1. Every byte is a token, so encoding
    loses nothing. The same texts give the same tokenizer. ``log`` gets a line every ``PROGRESS_S``
    seconds, from another thread.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = pre_tokenizers.Split(Regex(f".{{{LONGEST_PRE_TOKEN}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, cut])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(dict.fromkeys([bos_token, eos_token or bos_token])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with _progress(texts, log) as read:
        tokenizer.train_from_iterator(read, trainer)
    tokenizer.pre_tokenizer = words  # encoding needs no cut: its time is linear
    return tokenizer


@contextmanager
def _progress(texts: Iterable[str], log: Log) -> Iterator[Iterator[str]]:
    """Yields ``texts``; logs every ``PROGRESS_S`` seconds how far the training has come."""
    begin, ended = time.monotonic(), threading.Event()
    characters, step = 0, "reads text"

    def read() -> Iterator[str]:
        nonlocal characters, step
        for text in texts:
            characters += len(text)
            yield text
        step = "merges pairs of tokens"

    def report() -> None:
        while not ended.wait(PROGRESS_S):
            log(
                f"BPE training {step}: {characters / 1e6:,.1f} million characters read, "
                f"{time.monotonic() - begin:.0f} s"
            )

    reporter = threading.Thread(target=report, name="BPE progress", daemon=True)
    reporter.start()
    try:
        yield read()
    finally:
        ended.set()
        reporter.join()


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a ``tokenizer.json`` without its ``ignored_settings``.

    Raises ``ConfigError`` if the file is not one.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no specific type
        raise ConfigError(f"data.tokenizer={path} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):  # of BPE
        tokenizer.model.dropout = None
    return tokenizer


def ignored_settings(content: bytes) -> dict[str, Any]:
    """What ``load_tokenizer`` switches off in a file: truncation, padding, and dropout of merges.

    Each would change the tokens of a text. Empty for a file without them or of another format.
    """
    try:
        stored = json.loads(content)
        state = {key: stored.get(key) for key in ("truncation", "padding")}
        state["dropout"] = stored["model"].get("dropout")
    except (ValueError, AttributeError, KeyError, TypeError):
        return {}
    return {key: value for key, value in state.items() if value}


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """The largest id + 1: an embedding has a row for each id, also for ids that no token has."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def special_names(tokenizer: Tokenizer) -> list[str]:
    """The special tokens, in the order of their ids."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return [token.content for _, token in added if token.special]


def bos_id(tokenizer: Tokenizer, bos_token: str) -> int:
    """The id of the token that starts a document; ``ConfigError`` if there is no such token."""
    token_id = tokenizer.token_to_id(bos_token)
    if token_id is None:
        raise ConfigError(
            f"data.bos_token={bos_token} is not a token of data.tokenizer; "
            f"its special tokens: {', '.join(special_names(tokenizer)) or 'none'}"
        )
    return int(token_id)


def encode(
    tokenizer: Tokenizer, texts: list[str], special_tokens: str = SPECIAL_AS_TEXT
) -> list[list[int]]:
    """Token ids of each text.

    The name of a special token inside a text is ordinary text, or with ``special_tokens="ids"`` the
    id of that token. The post-processor takes no part: a template may repeat a text without any
    special token.
    """
    with _without_processor(tokenizer, special_tokens == SPECIAL_AS_TEXT):
        return [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def encode_with_offsets(
    tokenizer: Tokenizer, text: str, special_as_text: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text, and the range of characters of each. Otherwise as ``encode``."""
    with _without_processor(tokenizer, special_as_text):
        encoding = tokenizer.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets


@contextmanager
def _without_processor(tokenizer: Tokenizer, special_as_text: bool) -> Iterator[None]:
    tokenizer.encode_special_tokens = special_as_text
    processor, tokenizer.post_processor = tokenizer.post_processor, None
    try:
        yield
    finally:
        tokenizer.post_processor = processor
