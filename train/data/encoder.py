"""Texts -> documents of tokens: BOS, the text, and EOS unless ``data.eos_token`` is ``none``."""

from __future__ import annotations

from tokenizers import Tokenizer

from train.config import NO_EOS, ConfigError, DataConfig
from train.data.corpus import Document
from train.data.tokenizer import bos_id, encode, special_names, vocabulary_size
from train.text.token_ids import IdDecoder

# What published tokenizers call the token that ends a document. The tokens that end a turn of a
# chat (<|eot_id|>, <|im_end|>) are not among them.
EOS_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek, with characters outside of ASCII
)


class DocumentEncoder:
    """Encodes documents as ``data`` says. ``eos`` is None if no token ends a document.

    ``decoder`` decodes documents that another program has encoded with this tokenizer.

    Raises ``ConfigError`` if the tokenizer lacks one of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer, data: DataConfig) -> None:
        self.tokenizer, self.special_tokens = tokenizer, data.special_tokens
        self.bos = bos_id(tokenizer, data.bos_token)
        name = _eos_name(tokenizer, data)
        self.eos = None if name is None else int(tokenizer.token_to_id(name))
        self.decoder = IdDecoder(tokenizer, vocabulary_size(tokenizer), self.bos, self.eos)

    def texts(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without BOS and EOS."""
        return encode(self.tokenizer, texts, self.special_tokens)

    def documents(self, documents: list[Document]) -> list[list[int]]:
        """The tokens of each whole document, from its text or from its token ids."""
        end = [] if self.eos is None else [self.eos]
        encoded = iter(self.texts([d.text for d in documents if d.ids is None]))
        bodies = [next(encoded) if d.ids is None else d.ids.tolist() for d in documents]
        return [[self.bos, *body, *end] for body in bodies]


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
