"""8-bit formats: rounding to them, and the scale that fits a range of numbers into one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_SCALE = 2.0**-60  # of Q and K: a product of two is a normal float32, so -inf times it is -inf
MANTISSA, LOW_HALF = (1 << 23) - 1, (1 << 16) - 1  # bits of a float32; bfloat16 has the upper half
LEAST_V_SCALE = 2.0**-126  # the least normal float32; E4M3 then rounds to multiples of 2^-135


@dataclass(frozen=True)
class Format:
    """A signed 8-bit format, symmetric around 0.

    largest         finite value
    largest_of_row  value in a row of Q, see `row_scale`
    row_bits        significant bits of the scale of a row of Q. The backward takes numbers times
                    their scale in bfloat16, of 8 bits: E4M3 has 4, and int8 has 7, see `round_row`.
    """

    dtype: torch.dtype
    largest: float
    largest_of_row: float
    row_bits: int

    def scale(self, amax: torch.Tensor, least: float = LEAST_SCALE) -> torch.Tensor:
        """The scale for numbers up to `amax` in magnitude (float32): amax / largest, or `least`."""
        return (amax.float() / self.largest).clamp(min=least)

    def row_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """The scale of a row of Q: amax / largest_of_row, rounded up to `row_bits` bits. NaN stays.

        `largest_of_row` of int8 is even, as `round_row` may require.
        """
        scale = (amax.float() / self.largest_of_row).clamp(min=LEAST_SCALE)
        cut = (1 << 24 - self.row_bits) - 1
        bits = scale.view(torch.int32) + cut & ~cut
        return torch.where(scale.isnan(), torch.nan, bits.view(torch.float32))

    def tile_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """The scale of a tile of K: 1 / factor, where the factor largest / amax is rounded down to
        bfloat16: the backward applies it by a product in bfloat16.
        """
        factor = (self.largest / amax.float()).clamp(max=1 / LEAST_SCALE)
        return 1 / (factor.view(torch.int32) & ~LOW_HALF).view(torch.float32)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """x (float32) to the nearest value, ties to even. What exceeds the range saturates.

        E4M3 keeps NaN and makes infinities NaN; int8, which has none, makes both 0.
        """
        if self.dtype == torch.int8:
            return torch.nan_to_num(x, 0, 0, 0).round().clamp(-127, 127).to(torch.int8)
        saturated = x.clamp(-self.largest, self.largest)
        return torch.where(x.isinf(), torch.nan, saturated).to(self.dtype)

    def round_row(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """As `round`, of a row over its `row_scale`.

        Int8 numbers above 85 are even where the scale is 3 times a power of two: 3 times a larger
        odd number has 9 bits.
        """
        values = self.round(x)
        if self.dtype != torch.int8:
            return values
        threefold = scale.view(torch.int32) & MANTISSA > 0
        return torch.where(threefold & (x.abs() > 85.5), 2 * self.round(x / 2), values)


E4M3 = Format(torch.float8_e4m3fn, 448.0, largest_of_row=448.0, row_bits=4)
INT8 = Format(torch.int8, 127.0, largest_of_row=126.0, row_bits=2)


@dataclass(frozen=True)
class Formats:
    """The formats of a `precision`.

    qk  of Q and K
    v   of V and P; None: both stay in the dtype of the inputs
    """

    qk: Format
    v: Format | None


FORMATS = {"fp8": Formats(E4M3, E4M3), "int8": Formats(INT8, None)}
