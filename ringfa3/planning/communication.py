"""What plans ask of `ringfa3.ring`, which `import ringfa3` imports: planning sends no messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# PyTorch indexes rows of signed integers alone.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def select(x: torch.Tensor, index: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`torch.index_select` of any dtype, of an index on any device."""
    index = index.to(x.device)
    if x.dtype not in _SIGNED:  # a view as another dtype would end the gradient
        return x.index_select(dim, index)
    return x.view(_SIGNED[x.dtype]).index_select(dim, index).view(x.dtype)


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. The host does not wait for work of a GPU's stream."""
    if device.type == "cuda" and len(x):
        x = x.pin_memory()  # PyTorch reuses it only after the copy that reads it
    return x.to(device, non_blocking=True)


class Communication(NamedTuple):
    """How ranks of a plan communicate. Each function raises on all ranks, or on none.

    agree    agree(group, settings, error) returns if all ranks have equal settings and no error
    unshard  unshard(x_local, plan, dim): `TokenShards.unshard`, of a tensor
    move     move(x, exchange, plan, settings, fill): rows of a `RowExchange`
    """

    agree: Callable[[dist.ProcessGroup, dict[str, str], Exception | None], None]
    unshard: Callable[[torch.Tensor, Any, int], torch.Tensor]
    move: Callable[[torch.Tensor, Any, Any, dict[str, str], complex], torch.Tensor]


_given: Communication | None = None


def set_communication(given: Communication) -> None:
    global _given
    _given = given


def communication() -> Communication:
    """How ranks communicate. Raises RuntimeError: `set_communication` has not run."""
    if _given is None:
        raise RuntimeError("ranks cannot agree before ringfa3.ring is imported: import ringfa3")
    return _given


def require_agreement(
    group: dist.ProcessGroup | None, settings: dict[str, str], error: Exception | None
) -> None:
    """Raises an error of any rank on all ranks of the group; None: there is only this rank.

    Raises RuntimeError as `communication`.
    """
    if group is not None:
        communication().agree(group, settings, error)
    elif error is not None:
        raise error


def agreed_settings(x_local: torch.Tensor, plan: Any, dim: int) -> dict[str, str]:
    """What must be equal on all ranks. Raises ValueError, IndexError: this rank's is wrong."""
    if x_local.shape[dim] != plan.local_tokens:
        raise ValueError(
            f"x_local has {x_local.shape[dim]} tokens along dim {dim}; the plan gives this rank "
            f"{plan.local_tokens} of {plan.total_tokens}: pass this rank's shard"
        )
    sizes = [str(n) for n in x_local.shape]
    sizes[dim] = "tokens"
    return {
        "plan": f"{plan.total_tokens} tokens, digest {plan.digest}",
        "x_local": f"({', '.join(sizes)}) of {x_local.dtype} on {x_local.device.type}",
    }
