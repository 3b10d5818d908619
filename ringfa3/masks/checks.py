"""Checks of masks where others take them: plans, and functions of attention."""

from __future__ import annotations

from typing import Any

from ringfa3.masks.mask import Mask, check_mask
from ringfa3.validation import cumulative_bytes


def mask_or_documents(given: Any) -> tuple[Mask | None, bytes]:
    """A mask, or None and `cumulative_bytes`. Raises TypeError, ValueError: it is neither."""
    if isinstance(given, Mask):
        return given, b""
    try:
        return None, cumulative_bytes("cu_seqlens", given)
    except TypeError as problem:
        hint = "; a function of indices has no spans" if callable(given) else ""
        raise TypeError(
            f"{problem}, or a ringfa3.Mask of spans, documents, trees or blocks{hint}"
        ) from None


def check_mask_tokens(mask: Mask, q_tokens: int, k_tokens: int) -> None:
    """Raises TypeError, ValueError: it is no Mask of so many queries and keys."""
    check_mask(mask)
    if (mask.q_tokens, mask.k_tokens) != (q_tokens, k_tokens):
        raise ValueError(
            f"mask has {mask.q_tokens} queries and {mask.k_tokens} keys, the plan has {q_tokens} "
            f"and {k_tokens}: make it for the same tokens"
        )
