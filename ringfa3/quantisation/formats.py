"""8-bit formats: rounding to them, and the scale that fits a range of numbers into one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_SCALE = 2.0**-60  # of Q and K: a product of two is a normal float32, so -inf times it is -inf
LEAST_V_SCALE = 2.0**-126  # the least normal float32; E4M3 then rounds to multiples of 2^-135


@dataclass(frozen=True)
class Format:
    """A signed 8-bit format, symmetric around 0.

    largest  finite value
    """

    dtype: torch.dtype
    largest: float

    def scale(self, amax: torch.Tensor, least: float = LEAST_SCALE) -> torch.Tensor:
        """The scale for numbers up to `amax` in magnitude (float32): amax / largest, or `least`."""
        return (amax.float() / self.largest).clamp(min=least)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """x (float32) to the nearest value, ties to even. What exceeds the range saturates.

        E4M3 keeps NaN and makes infinities NaN; int8, which has none, makes both 0.
        """
        if self.dtype == torch.int8:
            return torch.nan_to_num(x, 0, 0, 0).round().clamp(-127, 127).to(torch.int8)
        saturated = x.clamp(-self.largest, self.largest)
        return torch.where(x.isinf(), torch.nan, saturated).to(self.dtype)


E4M3 = Format(torch.float8_e4m3fn, 448.0)
INT8 = Format(torch.int8, 127.0)


@dataclass(frozen=True)
class Formats:
    """The formats of a `precision`.

    qk  of Q and K
    v   of V and P; None: both stay in the dtype of the inputs
    """

    qk: Format
    v: Format | None


FORMATS = {"fp8": Formats(E4M3, E4M3), "int8": Formats(INT8, None)}
