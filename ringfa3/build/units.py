"""The units of a build: one shared library per direction, dtype and head dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ringfa3.errors import BuildError

ELEMENTS = {"bfloat16": "cutlass::bfloat16_t", "float16": "cutlass::half_t"}
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16"}
# Values of csrc/forward/policy.h and, for a backward, of csrc/backward/policy.h.
PRECISIONS = {"native": "Native", "fp8": "Fp8", "int8": "Int8", "dequantised": "Dequantised"}


class Variant(NamedTuple):
    """A kernel of the benchmark's ablation, never of the product."""

    define: str  # for the compiler; empty: the product's kernel, with another tile
    tile: tuple[int, int] | None = None  # (tile_m, tile_n) at head dim 128; None: the product's


VARIANTS = {  # "without-": the part that it lacks
    "without-overlap": Variant("-DRINGFA3_WITHOUT_OVERLAP"),  # softmax concurrent with own products
    "without-ping-pong": Variant("-DRINGFA3_WITHOUT_PING_PONG"),  # order of the warpgroups
    "without-specialisation": Variant("-DRINGFA3_UNSPECIALISED"),  # warps that only load
    "blocks-of-96": Variant("", (128, 96)),
    "three-stages": Variant("-DRINGFA3_THREE_STAGES", (128, 96)),  # S one block ahead
}
IN_KERNEL_TRANSPOSE = "in-kernel-transpose"
FP8_VARIANTS = {  # of precision "fp8" at head dim 128
    "two-warpgroups": Variant("", (128, 128)),  # the tile of those below; P is kept, as there
    IN_KERNEL_TRANSPOSE: Variant("-DRINGFA3_IN_KERNEL_TRANSPOSE", (128, 128)),  # V in row order
    "promotion-1": Variant("-DRINGFA3_PROMOTION=1", (128, 128)),  # float32 sums after every block
    "promotion-4": Variant("-DRINGFA3_PROMOTION=4", (128, 128)),  # after every fourth one
}


@dataclass(frozen=True)
class Unit:
    """One library: a direction, a dtype and a head dim, with its tile shape.

    tile_m     query rows: of a tile forward, of a block backward, with one scale in 8 bits
    tile_n     keys: of a block forward, of a tile backward, with one scale in 8 bits
    variant    one of `VARIANTS` or `FP8_VARIANTS`; empty for the product
    precision  of a forward; of a backward "native", or "dequantised" for that of 8-bit forwards:
               a key of `PRECISIONS`
    short      has fewer query rows a tile than the other unit of its direction, dtype and head dim
    clips      takes `CLIPPED_SPAN`; other units are free of the code for it
    """

    direction: str
    dtype: str
    head_dim: int
    tile_m: int
    tile_n: int
    variant: str = ""
    precision: str = "native"
    short: bool = False
    clips: bool = False

    @property
    def name(self) -> str:
        precision = "" if self.precision == "native" else self.precision
        form = "short" if self.short else "clips" if self.clips else self.variant
        values = "" if self.v_dim == self.head_dim else f"v{self.v_dim}"
        head_dims = f"d{self.head_dim}", values
        parts = (self.direction, *head_dims, DTYPE_NAMES[self.dtype], precision, form)
        return "-".join(filter(None, parts))

    @property
    def cluster(self) -> int:
        """CTAs that share a tile, as `BackwardShapes::Ctas`."""
        return 2 if self.direction == "backward" and self.head_dim > 128 else 1

    @property
    def v_dim(self) -> int:
        """The head dim of V and O; `head_dim` is that of Q and K."""
        return 128 if self.head_dim == 192 else self.head_dim

    @property
    def defines(self) -> tuple[str, ...]:
        return (
            f"-DRINGFA3_ELEMENT={ELEMENTS[self.dtype]}",
            f"-DRINGFA3_HEAD_DIM={self.head_dim}",
            f"-DRINGFA3_V_DIM={self.v_dim}",
            f"-DRINGFA3_TILE_M={self.tile_m}",
            f"-DRINGFA3_TILE_N={self.tile_n}",
            f"-DRINGFA3_PRECISION={PRECISIONS[self.precision]}",
            *(("-DRINGFA3_CLIPS=true",) if self.clips else ()),
            *filter(None, (_variant(self.variant).define if self.variant else "",)),
        )

    def as_variant(self, name: str) -> Unit:
        """This unit of the product as a variant, or unchanged if `name` is empty."""
        tile = _variant(name).tile if name and self.head_dim == 128 else None
        tile_m, tile_n = tile or (self.tile_m, self.tile_n)
        return replace(self, variant=name, tile_m=tile_m, tile_n=tile_n)


SHAPES = (  # (direction, precisions, head_dim, tile_m, tile_n)
    ("forward", ("native",), 64, 192, 128),
    ("forward", ("native",), 128, 128, 128),
    ("forward", ("native",), 192, 128, 128),
    ("forward", ("native",), 256, 128, 80),
    ("forward", ("fp8", "int8"), 64, 192, 128),
    ("forward", ("fp8", "int8"), 128, 192, 64),
    ("forward", ("fp8",), 256, 128, 128),
    ("forward", ("int8",), 256, 128, 64),
    ("backward", ("native",), 64, 128, 128),
    ("backward", ("native",), 128, 64, 128),
    ("backward", ("native",), 192, 64, 128),
    ("backward", ("native",), 256, 64, 128),
    ("backward", ("dequantised",), 64, 128, 128),
    ("backward", ("dequantised",), 128, 64, 128),
    ("backward", ("dequantised",), 256, 64, 128),
    ("quantise", ("native",), 64, 1, 128),
    ("quantise", ("native",), 128, 1, 128),
    ("quantise", ("native",), 256, 1, 128),
)
SHORT_SHAPES = (("forward", ("native",), 64, 128, 128),)
CLIPS_SHAPES = tuple(x for x in SHAPES if x[1] == ("native",) and x[0] != "quantise")
UNITS = tuple(
    Unit(direction, dtype, head_dim, tile_m, tile_n, "", precision, *form)
    for dtype in ELEMENTS
    for shapes, *form in ((SHAPES, False), (SHORT_SHAPES, True), (CLIPS_SHAPES, False, True))
    for direction, precisions, head_dim, tile_m, tile_n in shapes
    for precision in precisions
    if (precision, dtype) != ("dequantised", "float16")  # fp16 calls have bf16 operands then
)


def select_units(selectors: Sequence[str]) -> list[Unit]:
    """Units that selectors name, or all for "all".

    The name of a unit, `forward-d128-bf16`, selects it alone; other words, like `d128`, every unit
    whose name has them all.

    Raises BuildError: a selector matches none.
    """
    if "all" in selectors:
        return list(UNITS)
    for selector in selectors:
        if not any(_matches(unit, selector) for unit in UNITS):
            raise BuildError(
                f"unknown unit {selector}: allowed are all, "
                f"{', '.join(unit.name for unit in UNITS)}, and parts of these like d128-bf16"
            )
    return [unit for unit in UNITS if any(_matches(unit, selector) for selector in selectors)]


@lru_cache(None)
def short_unit(unit: Unit) -> Unit | None:
    """The unit like `unit`, but short; None: there is none."""
    short = replace(unit, short=True)
    return next((u for u in UNITS if replace(u, tile_m=unit.tile_m) == short), None)


def _variant(name: str) -> Variant:
    return VARIANTS[name] if name in VARIANTS else FP8_VARIANTS[name]


def _matches(unit: Unit, selector: str) -> bool:
    if any(other.name == selector for other in UNITS):
        return unit.name == selector
    return set(selector.split("-")) <= set(unit.name.split("-"))
