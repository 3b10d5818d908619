"""Buckets of token positions, by powers of two, and sums over them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def n_buckets(seq_len: int) -> int:
    """Number of buckets for the positions in a document of ``seq_len`` tokens."""
    return (seq_len - 1).bit_length() + 1


def position_buckets(positions_T: Tensor) -> Tensor:
    """Bucket of each position, int64: 0 for position 0, b for positions [2^(b-1), 2^b)."""
    begins = 2 ** torch.arange(63, dtype=torch.int64, device=positions_T.device)
    return torch.bucketize(positions_T, begins, right=True)


def bucket_label(bucket: int) -> str:
    """The positions of a bucket, as a label for tables and plots."""
    if bucket < 2:
        return str(bucket)
    return f"{2 ** (bucket - 1)}-{2**bucket - 1}"


TOKENS_AT_ONCE = 1 << 17  # 22 MB of float64 in 21 buckets


def sum_by_bucket(values_T: Tensor, buckets_T: Tensor, buckets: int) -> Tensor:
    """Sum of ``values_T`` in each bucket, (buckets,) float64, deterministic on every device.

    It reduces one row of values per bucket, because ``index_add`` has no fixed order on a GPU.
    """
    every_B1 = torch.arange(buckets, dtype=torch.int64, device=buckets_T.device)[:, None]
    sums_B = torch.zeros(buckets, dtype=torch.float64, device=values_T.device)
    parts = (x.split(TOKENS_AT_ONCE) for x in (values_T.double(), buckets_T))
    for value_T, bucket_T in zip(*parts, strict=True):
        sums_B += torch.where(bucket_T == every_B1, value_T, 0).sum(1)
    return sums_B


def mean_by_bucket(losses: list[float], tokens: list[int]) -> list[float]:
    """``losses / tokens`` of each bucket, NaN for a bucket without tokens."""
    return [loss / n if n else math.nan for loss, n in zip(losses, tokens, strict=True)]
