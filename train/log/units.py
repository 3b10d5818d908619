"""The units of a loss: nats per token, perplexity, nats per byte and bits per byte.

nats per token = (sum of -ln p(token | tokens before it)) / (tokens that are predicted)

nats per byte = (the same sum) / (UTF-8 bytes of the text)

The sum is over all tokens except BOS. Perplexity is exp(nats per token), and bits per byte are
nats per byte / ln 2. The console and plots use nats per token, with the others next to it. Nats
and bits per byte do not depend on the tokenizer: they compare models with other tokenizers, and
gzip. Records (JSON) have all four.
"""

from __future__ import annotations

import math

MOST_NATS = 700.0  # exp of more is no float64


def bits(nats: float) -> float:
    """``nats`` in bits."""
    return nats / math.log(2)


def perplexity(nats_per_token: float) -> float:
    """exp(``nats_per_token``), infinite where that exceeds float64."""
    return math.exp(nats_per_token) if nats_per_token < MOST_NATS else nats_per_token * math.inf


def all_units(nats_per_token: float, nats_per_byte: float) -> dict[str, float]:
    """The loss under the keys of records; ``loss`` is in nats per token."""
    return {
        "loss": nats_per_token,
        "perplexity": perplexity(nats_per_token),
        "nats_per_byte": nats_per_byte,
        "bits_per_byte": bits(nats_per_byte),
    }


def loss_of(record: dict[str, float | None]) -> float:
    """Nats per token of a record, also of an earlier version; NaN for a step without a loss."""
    loss = record.get("loss")
    if loss is None and record.get("nats_per_byte") is not None and "bytes" in record:
        loss = record["nats_per_byte"] * record["bytes"] / record["tokens"]
    return math.nan if loss is None else loss


def cells(nats_per_token: float, nats_per_byte: float) -> tuple[str, str, str]:
    """Cells of a table: nats per token, perplexity, bits per byte."""
    loss, other = f"{nats_per_token:.3f}", f"{perplexity(nats_per_token):.4g}"
    return loss, other, f"{bits(nats_per_byte):.3f}"


def in_words(nats_per_token: float, nats_per_byte: float) -> str:
    """The loss for a line on the console, with its units."""
    loss, other, per_byte = cells(nats_per_token, nats_per_byte)
    return f"{loss} nats per token (perplexity {other}, {per_byte} bits per byte)"


UNITS = ("nats per token", "perplexity", "bits per byte")  # heads of the columns of ``cells``
