"""Statistics of K and V per KV head and channel, and the centres and scales that they give.

They are of a call, not of a rank: ranks gather their statistics and combine them in rank order, so
that all K/V of a ring have one mean and one scale of V. Numbers that are not finite do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringfa3.quantisation.formats import LEAST_V_SCALE, Formats

BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


class ChannelStatistics(NamedTuple):
    """(4, hk, d) float32: the sum of K, and the sum, maximum and minimum of V, over `tokens`.

    Over no tokens the maximum is -inf and the minimum inf.
    """

    values: torch.Tensor
    tokens: int

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> ChannelStatistics:
        """The statistics of k, v (n, hk, d)."""
        none = k.new_full((1, *k.shape[1:]), torch.inf, dtype=torch.float32)
        k, v = k.float(), v.float()
        finite = v.isfinite()
        high = torch.cat((v.where(finite, -torch.inf), -none)).amax(0)
        low = torch.cat((v.where(finite, torch.inf), none)).amin(0)
        sums = (torch.where(x.isfinite(), x, 0).sum(0) for x in (k, v))
        return cls(torch.stack((*sums, high, low)), len(k))

    @classmethod
    def combine(cls, parts: Sequence[ChannelStatistics]) -> ChannelStatistics:
        """The statistics of all tokens, from those of the ranks in rank order."""
        k_sum, v_sum, high, low = parts[0].values
        for part in parts[1:]:
            k_sum, v_sum = k_sum + part.values[0], v_sum + part.values[1]
            high, low = high.maximum(part.values[2]), low.minimum(part.values[3])
        return cls(torch.stack((k_sum, v_sum, high, low)), sum(part.tokens for part in parts))


class KVCentres(NamedTuple):
    """What is subtracted from K and V, rounded to bfloat16, and V's scale; (hk, d) float32 each.

    V that stays in 16 bits has the mean 0 and the scale 1.
    """

    k_mean: torch.Tensor
    v_mean: torch.Tensor
    v_scale: torch.Tensor

    @classmethod
    def of(cls, statistics: ChannelStatistics, formats: Formats) -> KVCentres:
        k_sum, v_sum, high, low = statistics.values
        k_mean, v_mean = (_mean(x, statistics.tokens) for x in (k_sum, v_sum))
        if formats.v is None:
            return cls(k_mean, torch.zeros_like(v_mean), torch.ones_like(v_mean))
        amax = torch.maximum(high - v_mean, v_mean - low)
        # Where the sum, or the distance from the mean, has overflowed: the middle of the range.
        centred = v_sum.isfinite() & (amax < torch.inf)
        v_mean = torch.where(centred, v_mean, _rounded(high / 2 + low / 2))
        amax = torch.maximum(high - v_mean, v_mean - low)
        # Differences of float32 numbers are 0 or at least 2^-24 of one of them, so this is the
        # larger one where all are 0: mean / scale must not overflow.
        amax = amax.maximum(v_mean.abs() * 2.0**-60)
        return cls(k_mean, v_mean, formats.v.scale(amax, LEAST_V_SCALE))


def _mean(total: torch.Tensor, tokens: int) -> torch.Tensor:
    """The mean rounded to bfloat16; 0 where the sum has overflowed."""
    return torch.where(total.isfinite(), _rounded(total / max(tokens, 1)), 0)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bfloat16, its largest number where that is nearest of the finite ones."""
    return x.clamp(-BFLOAT16_MAX, BFLOAT16_MAX).bfloat16().float()
