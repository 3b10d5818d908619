"""Selects what runs a hop: the kernel for the tensors, else the PyTorch fallback, which it logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from ringfa3.kernels import backward, forward, local_kv, quantised, quantised_reference, reference
from ringfa3.kernels.symbolic import gpu_elsewhere
from ringfa3.quantisation.dequantised import FACTOR_COLUMNS, operand_dtype
from ringfa3.quantisation.formats import FORMATS
from ringfa3.validation import HEAD_DIM_STEP

if TYPE_CHECKING:  # imported where it is used: `python -m ringfa3.build` runs without kernels
    from ringfa3.build.units import Unit
    from ringfa3.planning.context_plan import ContextPlan
    from ringfa3.planning.tile_schedule import Tiling
    from ringfa3.planning.tiling import Plan
    from ringfa3.quantisation.channels import ChannelStatistics, KVCentres
    from ringfa3.quantisation.dequantised import DequantisedInputs
    from ringfa3.quantisation.key_tiles import KeyTiles
    from ringfa3.quantisation.operands import QuantisedQ
    from ringfa3.quantisation.tile_records import TileRecords


# Measured at d64: a short unit takes about 1.2 times as long for a score. Sequences that are longer
# on average than LONG_ROWS fill the tiles of both units.
SHORT_SHARE, LONG_ROWS = 0.8, 2048


class ForwardKernel(NamedTuple):
    """What runs one hop of the forward.

    tile_m           query rows of a tile
    attend           as `reference.attend`
    new_partial_out, read_partial_out
                     O between hops, as in `reference`
    takes_arrivals   whether `attend` takes `arrivals`, the arrival flags of spans, on the device
    """

    tile_m: int
    attend: Callable[..., None]
    new_partial_out: Callable[[torch.Tensor, Plan], torch.Tensor]
    read_partial_out: Callable[[torch.Tensor, Tiling], torch.Tensor]
    takes_arrivals: bool


class QuantisedForward(Protocol):
    """What runs the forward in 8 bits: of one device by `quantise` and `attend`.

    Ranks of a ring gather their `statistics`, quantise with the `centres` of all, exchange records,
    and attend the `keys` of records.

    tile_m  query rows of a tile
    """

    tile_m: int

    def quantise(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan
    ) -> tuple[QuantisedQ, Any]:
        """As `operands.quantise`, of the keys of a plan with one hop; K/V are for `attend`."""

    def statistics(self, k: torch.Tensor, v: torch.Tensor) -> ChannelStatistics:
        """The statistics of k, v (n, hk, d)."""

    def centres(self, parts: Sequence[ChannelStatistics]) -> KVCentres:
        """From the statistics of all ranks, in rank order."""

    def quantise_q(self, q: torch.Tensor, centres: KVCentres) -> QuantisedQ:
        """As `operands.quantise_q`."""

    def quantise_kv(
        self, k: torch.Tensor, v: torch.Tensor, tiles: KeyTiles, centres: KVCentres
    ) -> TileRecords:
        """The tiles of k, v (n, hk, d), as `operands.quantise_kv`."""

    def dequantise(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: KeyTiles,
        centres: KVCentres,
        lse: torch.Tensor,
        scale: float,
    ) -> DequantisedInputs:
        """What a backward takes in place of q (t, h, d), k, v (n, hk, d) and lse (h, t)."""

    def keys(self, records: TileRecords, centres: KVCentres) -> Any:
        """K/V for `attend`, whose tiles lie `KEY_TILE` rows apart."""

    def new_partial_out(self, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        """As `ForwardKernel.new_partial_out`."""

    def attend(
        self,
        q: QuantisedQ,
        kv: Any,
        tiling: Tiling,
        scale: float,
        out: torch.Tensor,
        partial_out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """As `quantised_reference.attend`."""


BackwardPass: TypeAlias = reference.BackwardPass | backward.BackwardPass


class BackwardKernel(NamedTuple):
    """What runs the hops of a backward.

    tile_n     keys of a tile
    tile_m     query rows of a block of the padded rows
    make_pass  makes the pass of one call, as `reference.BackwardPass`
    """

    tile_n: int
    tile_m: int
    make_pass: Callable[..., BackwardPass]


def select_forward(q: torch.Tensor, plan: Plan, v_dim: int | None = None) -> ForwardKernel:
    """The forward of a plan for queries like `q` (t, h, d), compiled at its first use.

    v_dim: the head dim of out, and of V without columns of zeros; None: that of q.
    """
    unit = _select_unit("forward", q, clips=plan.clips, v_dim=v_dim)
    if unit is None:
        return ForwardKernel(
            reference.TILE_M,
            reference.attend,
            reference.new_partial_out,
            reference.read_partial_out,
            takes_arrivals=False,
        )
    unit = _unit_of_plan(unit, q.shape[0], plan)
    return ForwardKernel(
        unit.tile_m,
        partial(forward.attend, unit),
        partial(forward.new_partial_out, unit),
        partial(forward.read_partial_out, min(unit.v_dim, q.shape[-1])),
        takes_arrivals=True,
    )


def _unit_of_plan(unit: Unit, tokens: int, plan: Plan) -> Unit:
    """The short unit in place of `unit`, where it computes so much less that it is faster."""
    from ringfa3.build.units import short_unit

    short = short_unit(unit)
    if short is None or tokens > LONG_ROWS * len(plan.queries):
        return unit
    scores, fewer = (plan.forward_scores(u.tile_m, u.tile_n) for u in (unit, short))
    if not fewer < SHORT_SHARE * scores:
        return unit
    problem = None if gpu_elsewhere() is not None else _build_problem(short)
    if problem is None:
        return short
    log_once(f"short sequences use {unit.name}, which is slower for them: {problem}")
    return unit


def select_quantised(q: torch.Tensor, precision: str) -> QuantisedForward:
    """As `select_forward`, for "fp8" or "int8"."""
    formats = FORMATS[precision]
    quantiser, unit = _select_unit("quantise", q), _select_unit("forward", q, precision)
    if quantiser is None or unit is None:
        return quantised_reference.QuantisedReference(formats)
    return quantised.QuantisedKernel(unit, quantiser, formats)


def select_backward(
    q: torch.Tensor, precision: str = "native", clips: bool = False, v_dim: int | None = None
) -> BackwardKernel:
    """As `select_forward`, for the backward of a call with a precision; clips: `Plan.clips`."""
    native = precision == "native"
    of = "native" if native else "dequantised"
    unit = _select_unit("backward", q, of, clips=clips, v_dim=v_dim)
    if unit is None:
        fallback = partial(reference.BackwardPass, dequantised=not native)
        return BackwardKernel(reference.TILE_N, reference.TILE_M, fallback)
    return BackwardKernel(unit.tile_n, unit.tile_m, partial(backward.BackwardPass, unit))


def select_local_kv(
    direction: str,
    k: torch.Tensor,
    plan: ContextPlan,
    precision: str = "native",
    v_dim: int | None = None,
) -> local_kv.LocalKV:
    """What moves a rank's local K/V in a pass of several ranks, for its K (t, hk, d).

    precision: of the call; a backward in 8 bits has the K of `DequantisedInputs`.
    v_dim: as in `select_forward`.
    """
    unit = _select_unit(direction, *_attended(k, precision), v_dim=v_dim)
    if unit is None:
        return local_kv.LocalKVReference(plan, k.device)
    return local_kv.LocalKVKernels(unit, plan)


def _attended(k: torch.Tensor, precision: str) -> tuple[torch.Tensor, str]:
    """K with the head dim of Q, and the precision of the unit that attends to it."""
    if precision == "native":
        return k, precision
    return k[..., :-FACTOR_COLUMNS], "dequantised"


def _select_unit(
    direction: str,
    q: torch.Tensor,
    precision: str = "native",
    clips: bool = False,
    v_dim: int | None = None,
) -> Unit | None:
    """The unit to run; None for the PyTorch fallback, which is logged on a GPU."""
    reason = fallback_reason(direction, q, precision, clips, v_dim)
    if reason is None:
        unit = unit_for(direction, q, precision, v_dim)
        return _clipping(unit) if unit is not None and clips else unit
    if q.is_cuda:
        log_fallback(reason)
    return None


def fallback_reason(
    direction: str,
    q: torch.Tensor,
    precision: str = "native",
    clips: bool = False,
    v_dim: int | None = None,
) -> str | None:
    """Why the PyTorch fallback runs a direction for queries like `q` (t, h, d).

    None if a kernel runs it; this call compiles the kernel if the cache does not have it, but not
    its short unit, which the first plan that takes it compiles. v_dim: as in `select_forward`.
    """
    unit = unit_for(direction, q, precision, v_dim)
    if unit is not None and gpu_elsewhere() is not None:
        return None
    if unit is None:
        where = torch.cuda.get_device_name(q.device) if q.is_cuda else "the CPU"
        return f"no fused kernel for head_dim {q.shape[-1]} on {where}"
    return _build_problem(_clipping(unit) if clips else unit)


@lru_cache(None)
def _clipping(unit: Unit) -> Unit:
    return replace(unit, clips=True)


def unit_for(
    direction: str, q: torch.Tensor, precision: str = "native", v_dim: int | None = None
) -> Unit | None:
    """The unit of a direction for queries like `q` (t, h, d); None: there is no kernel.

    v_dim: as in `select_forward`.
    """
    if gpu_elsewhere() is not None:
        return narrowest_unit(direction, q.dtype, q.shape[-1], precision, v_dim)
    if not q.is_cuda:
        return None
    return _unit_for(direction, q.device, q.dtype, q.shape[-1], precision, v_dim)


@lru_cache(None)
def _unit_for(
    direction: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    precision: str,
    v_dim: int | None,
) -> Unit | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return narrowest_unit(direction, dtype, head_dim, precision, v_dim)


@lru_cache(None)
def narrowest_unit(
    direction: str,
    dtype: torch.dtype,
    head_dim: int,
    precision: str = "native",
    v_dim: int | None = None,
) -> Unit | None:
    """The unit that takes tensors of a head dim on Hopper; None: there is none.

    A unit of attention in 16 bits takes multiples of 8 up to its own head dim, as `Tensor3` in
    csrc/params.h says. Other units take their own alone, and so do units with a narrower V.
    v_dim: as in `select_forward`.
    """
    from ringfa3.build.units import UNITS

    if precision == "dequantised":
        dtype = operand_dtype(dtype)
    wanted = (direction, str(dtype).removeprefix("torch."), precision)
    units = [u for u in UNITS if (u.direction, u.dtype, u.precision) == wanted]
    units = [u for u in units if not u.short and not u.clips]
    if direction == "quantise" or precision != "native" or head_dim % HEAD_DIM_STEP:
        units = [u for u in units if u.head_dim == head_dim]
    own = head_dim, v_dim
    fitting = (
        u
        for u in units
        if (u.head_dim, u.v_dim) == own or (u.head_dim == u.v_dim and u.head_dim >= head_dim)
    )
    return min(fitting, key=lambda u: u.head_dim, default=None)


def has_kernels(units: Iterable[Unit]) -> bool:
    """Whether all of them can be built."""
    return all(_build_problem(unit) is None for unit in units)


@lru_cache(None)
def _build_problem(unit: Unit) -> str | None:
    """Why a unit cannot be built; None if it can. Cached: a failed build is not tried again."""
    from ringfa3.build.compile import ensure_library
    from ringfa3.errors import BuildError

    try:
        ensure_library(unit)
    except (BuildError, OSError) as error:  # OSError: of the cache's or the sources' folder
        return f"the kernel {unit.name} cannot be built ({error})"
    return None


def log_fallback(reason: str) -> None:
    """Prints once per process and reason that the PyTorch fallback runs attention."""
    log_once(f"using the PyTorch fallback (exact, slow): {reason}")


@lru_cache(None)
def log_once(what: str) -> None:
    """Prints a line once per process. Ranks may differ, so each prints its own."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    who = "" if local_rank == "0" else f"local rank {local_rank}: "
    print(f"ringfa3: {who}{what}", file=sys.stderr, flush=True)
