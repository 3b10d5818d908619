"""Which code runs a hop: the kernel that fits the tensors, or the executor, which says so."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ringfa3 import kernels, reference

if TYPE_CHECKING:  # imported where it is used, so that `python -m ringfa3.build` can be run
    from ringfa3.build import Unit

NO_BACKWARD = "there are no backward kernels in this version"


class Forward(NamedTuple):
    """Runs one hop of the forward: `attend` as `reference.attend`, on tiles of `tile_m` rows."""

    tile_m: int
    attend: Callable[..., None]


def forward_engine(q: torch.Tensor, sm_margin: int = 0) -> Forward:
    """The engine for queries like `q` (t, h, d). A kernel is compiled at its first use.

    It leaves `sm_margin` SMs free. Raises ValueError: a margin that leaves none to the kernel.
    """
    unit = kernels.forward_unit(q)
    reason = _no_forward(unit, q)
    if unit is not None and reason is None:
        kernels.ctas(q.device, sm_margin)
        return Forward(unit.tile_m, partial(kernels.attend, unit, sm_margin=sm_margin))
    if q.is_cuda and reason is not None:
        say_executor(reason)
    return Forward(reference.TILE_M, reference.attend)


def executor_reason(direction: str, q: torch.Tensor) -> str | None:
    """Why "forward" or "backward" for queries like `q` (t, h, d) runs on the executor.

    None where a kernel runs it; that is compiled if it has not been.
    """
    if direction == "backward":
        return NO_BACKWARD
    return _no_forward(kernels.forward_unit(q), q)


def _no_forward(unit: Unit | None, q: torch.Tensor) -> str | None:
    if unit is not None:
        return _problem(unit)
    where = torch.cuda.get_device_name(q.device) if q.is_cuda else "the CPU"
    return f"there is no kernel for head_dim {q.shape[-1]} on {where}"


@lru_cache(None)
def _problem(unit: Unit) -> str | None:
    """Why a unit cannot be had; None if it can. Asked once: a build is not tried again."""
    from ringfa3.build import library
    from ringfa3.toolchain import BuildError

    try:
        library(unit)
    except (BuildError, OSError) as error:  # OSError: the cache or the sources, by their path
        return f"its kernel cannot be built ({error})"
    return None


def backward_tiles(q: torch.Tensor) -> tuple[int, int]:
    """(keys, rows) of backward tiles for queries like `q`: those of the executor."""
    if q.is_cuda:
        say_executor(NO_BACKWARD)
    return reference.TILE_N, reference.TILE_M


@lru_cache(None)
def say_executor(reason: str) -> None:
    """Once per host and reason, in one line: that attention runs on the executor."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        said = f"ringfa3: attention runs on its PyTorch executor, exact but slow: {reason}"
        print(said, file=sys.stderr, flush=True)
