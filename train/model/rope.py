"""RoPE: the frequencies of ``model.rope``, and the rotation of queries and keys.

Shapes are written as suffixes, as in ``transformer.py``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from train.sections.model import RopeConfig


class Rotation(NamedTuple):
    """Cosine and sine of every token's rotary angles, (T, 1, C/2) float32, times one factor."""

    cos: Tensor
    sin: Tensor


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """Angle per position of each channel pair, (head_dim / 2,) float64.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` and ``yarn`` divide those of long
    wavelengths, leave those of short ones, and interpolate in between:

    * ``llama3`` by the number of rotations over ``original_len`` tokens, from ``low_freq_factor``
      to ``high_freq_factor``;
    * ``yarn`` by the index of the pair, between the pairs with ``beta_slow`` and ``beta_fast``
      rotations over ``original_len`` tokens.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    frequencies = rope.theta**-exponents
    if rope.type == "default":
        return frequencies
    if rope.type == "linear":
        return frequencies / rope.factor
    share = (_llama3_share if rope.type == "llama3" else _yarn_share)(frequencies, rope)
    return share * frequencies + (1 - share) * frequencies / rope.factor


def _llama3_share(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """The share of each frequency that is not scaled, 0 to 1."""
    rotations = rope.original_len * frequencies / (2 * math.pi)  # over the original context
    share = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return share.clamp(0, 1)


def _yarn_share(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """The share of each frequency that is not scaled, 0 to 1."""
    pairs = len(frequencies)

    def pair_of(rotations: float) -> float:
        """The index of the pair, a fraction, with so many rotations over the original context."""
        ratio = rope.original_len / (2 * math.pi * rotations)
        return pairs * math.log(ratio) / math.log(rope.theta)

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high = high + 0.001 if high == low else high
    numbers = torch.arange(pairs, dtype=torch.float64, device="cpu")
    return 1 - ((numbers - low) / (high - low)).clamp(0, 1)


def attention_factor(rope: RopeConfig) -> float:
    """The factor that multiplies queries and keys: 1 unless the type is ``yarn``."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1


def rotation(positions_T: Tensor, frequencies: Tensor, factor: float = 1.0) -> Rotation:
    """The rotation of each token, times ``factor``.

    Angles are computed in float64: positions may exceed 2^24.
    """
    angles = positions_T.double()[:, None, None] * frequencies.to(positions_T.device)
    return Rotation((angles.cos() * factor).float(), (angles.sin() * factor).float())


def rotate(x_THC: Tensor, rotation: Rotation) -> Tensor:
    """Rotate channels i and i + C/2 of ``x`` as a pair, in float32; returns the dtype of ``x``."""
    first, second = x_THC.float().chunk(2, dim=-1)
    cos, sin = rotation
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_THC.dtype)
