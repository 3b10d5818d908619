"""Which code runs a hop: the kernel that fits the tensors, or the executor, which says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ringfa3.kernels import backward, launch, reference

if TYPE_CHECKING:  # imported where it is used, so that `python -m ringfa3.build` can be run
    from ringfa3.build.units import Unit


class ForwardKernel(NamedTuple):
    """What runs one hop of the forward.

    tile_m          query rows of a tile
    attend          as `reference.attend`
    takes_arrivals  whether `attend` takes `arrivals`, the words that spans wait for on the device
    """

    tile_m: int
    attend: Callable[..., None]
    takes_arrivals: bool


class BackwardKernel(NamedTuple):
    """What runs the hops of a backward.

    tile_n     keys of a tile
    tile_m     query rows of a block of the row grid
    make_pass  makes the pass of one call, as `reference.BackwardPass`
    """

    tile_n: int
    tile_m: int
    make_pass: Callable[..., reference.BackwardPass | backward.BackwardPass]


def select_forward(q: torch.Tensor, sm_margin: int = 0) -> ForwardKernel:
    """The forward for queries like `q` (t, h, d). A kernel is compiled at its first use.

    It leaves `sm_margin` SMs free. Raises ValueError: a margin that leaves none to the kernel.
    """
    unit = _unit("forward", q, sm_margin)
    if unit is None:
        return ForwardKernel(reference.TILE_M, reference.attend, False)
    return ForwardKernel(unit.tile_m, partial(launch.attend, unit, sm_margin=sm_margin), True)


def select_backward(q: torch.Tensor, sm_margin: int = 0) -> BackwardKernel:
    """As `select_forward`, for the backward."""
    unit = _unit("backward", q, sm_margin)
    if unit is None:
        return BackwardKernel(reference.TILE_N, reference.TILE_M, reference.BackwardPass)
    make_pass = partial(backward.BackwardPass, unit, sm_margin=sm_margin)
    return BackwardKernel(unit.tile_n, unit.tile_m, make_pass)


def _unit(direction: str, q: torch.Tensor, sm_margin: int) -> Unit | None:
    """The kernel to run; None for the executor, which a GPU's user is told."""
    reason = executor_reason(direction, q)
    if reason is None:
        launch.ctas(q.device, sm_margin)
        return launch.unit_for(direction, q)
    if q.is_cuda:
        say_executor(reason)
    return None


def executor_reason(direction: str, q: torch.Tensor) -> str | None:
    """Why "forward" or "backward" for queries like `q` (t, h, d) runs on the executor.

    None where a kernel runs it; that is compiled if it has not been.
    """
    unit = launch.unit_for(direction, q)
    if unit is None:
        where = torch.cuda.get_device_name(q.device) if q.is_cuda else "the CPU"
        return f"there is no kernel for head_dim {q.shape[-1]} on {where}"
    return _problem(unit)


@lru_cache(None)
def _problem(unit: Unit) -> str | None:
    """Why a unit cannot be had; None if it can. Asked once: a build is not tried again."""
    from ringfa3.build.compile import ensure_library
    from ringfa3.errors import BuildError

    try:
        ensure_library(unit)
    except (BuildError, OSError) as error:  # OSError: the cache or the sources, by their path
        return f"its kernel cannot be built ({error})"
    return None


@lru_cache(None)
def say_executor(reason: str) -> None:
    """Once per host and reason, in one line: that attention runs on the executor."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        said = f"ringfa3: attention runs on its PyTorch executor, exact but slow: {reason}"
        print(said, file=sys.stderr, flush=True)
