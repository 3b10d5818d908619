"""Byte-level BPE: train one, or load a ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train.config import ConfigError


def train_tokenizer(texts: Iterable[str], vocab_size: int, bos_token: str) -> Tokenizer:
    """Train a BPE over bytes with at most ``vocab_size`` tokens; ``bos_token`` gets id 0.

    Every byte is a token, so encoding loses nothing. The same texts give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[bos_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a ``tokenizer.json``; ``ConfigError`` if the file is not one."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no specific type
        raise ConfigError(f"data.tokenizer={path} is not a tokenizer.json: {error}") from None


def bos_id(tokenizer: Tokenizer, bos_token: str) -> int:
    """The id of the token that starts a document; ``ConfigError`` if there is no such token."""
    token_id = tokenizer.token_to_id(bos_token)
    if token_id is None:
        special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        raise ConfigError(
            f"data.bos_token={bos_token} is not a token of data.tokenizer; "
            f"its special tokens: {', '.join(special) or 'none'}"
        )
    return int(token_id)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text. The name of a special token inside a text is ordinary text."""
    tokenizer.encode_special_tokens = True
    return [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
