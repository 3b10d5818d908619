"""Nats per byte and bits per byte, the units of the loss on a text.

nats per byte = (sum of -ln p(token | tokens before it)) / (UTF-8 bytes of the text)

bits per byte = nats per byte / ln 2

The sum is over all tokens except BOS. Nats per token depend on the tokenizer; nats per byte do not,
so models with other tokenizers, and gzip, can be compared. Plots use nats per byte. Records (JSON)
and tables have both; other publications use bits per byte.
"""

from __future__ import annotations

import math


def bits(nats: float) -> float:
    """``nats`` in bits."""
    return nats / math.log(2)


def with_bits(nats: float, digits: int) -> str:
    """``nats`` with so many decimals, and in parentheses the same in bits: a cell of a table."""
    return f"{nats:.{digits}f} ({bits(nats):.{digits}f})"


def both_units(nats_per_byte: float) -> dict[str, float]:
    """The loss under the keys of records: ``nats_per_byte`` and ``bits_per_byte``."""
    return {"nats_per_byte": nats_per_byte, "bits_per_byte": bits(nats_per_byte)}
