"""What callers may pass as `group`, and whether a process group still exists."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ringfa3.validation import whole_numbers

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | tuple[int, int] | None"
DESTROYED = (
    "group: this process group has been destroyed: make a new one, and with it new plans and layers"
)

T = TypeVar("T")
_on_new_plan: Callable[[Any], None] | None = None


def set_on_new_plan(on_new_plan: Callable[[Any], None]) -> None:
    """on_new_plan(plan) runs when a plan with a process group is made, on any thread, so that ranks
    agree on it before its first call. `ringfa3.ring` gives it: planning knows no calls."""
    global _on_new_plan
    _on_new_plan = on_new_plan


def new_plan(plan: T) -> T:
    """The plan, which was made just now."""
    if _on_new_plan is not None:
        _on_new_plan(plan)
    return plan


def resolve_group(group: Group) -> tuple[int, int, dist.ProcessGroup | None]:
    """(rank, world, process group) of a `group` as in `plan_context`.

    Raises TypeError, ValueError: it has another form, it has been destroyed, or this process is no
    member.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1, None
        group = dist.group.WORLD
        assert group is not None
    if dist.is_available():
        group = _of_mesh(group) if isinstance(group, DeviceMesh) else group
        if cast(object, group) is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this process is not a member of it")
        if isinstance(group, dist.ProcessGroup):
            require_alive(group)
            rank = dist.get_rank(group)
            if rank < 0:
                raise ValueError("group: this process is not a member of it")
            return rank, dist.get_world_size(group), group
    if not (isinstance(group, tuple) and len(group) == 2):
        raise TypeError(
            f"group={group!r}: give a ProcessGroup, a one-dimensional DeviceMesh, (rank, world) or "
            "None"
        )
    rank, world = whole_numbers("group", group)
    if not 0 <= rank < world:
        raise ValueError(f"group={group!r}: rank must lie in [0, world)")
    return rank, world, None


@lru_cache(None)
def warn_if_alone() -> None:
    """Warns once of a plan for one rank in a process that torchrun started with others."""
    started = os.environ.get("WORLD_SIZE", "1")
    if dist.is_available() and dist.is_torchelastic_launched() and started != "1":
        warnings.warn(
            f"torchrun started {started} processes, but init_process_group was not called: this "
            "plan is for one rank; call it first, or pass group=(0, 1)",
            stacklevel=3,  # the caller of `plan_context`
        )


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension. Raises ValueError for another mesh."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        one = f"mesh[{names[-1]!r}]" if names else "of init_device_mesh(..., mesh_dim_names=(...))"
        raise ValueError(
            f"group: a DeviceMesh of {mesh.ndim} dimensions, {names or tuple(mesh.shape)}: give "
            f"one of them, as in group={one}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("group: this process is not a member of the DeviceMesh")
    return mesh.get_group()


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether the group has not been destroyed."""
    return group is not None and group in c10d._world.pg_map


def require_alive(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group. Raises ValueError: it has been destroyed, and maybe freed (None)."""
    if group is None or not is_alive(group):
        raise ValueError(DESTROYED)
    return group


# By these, plans and caches name a group without keeping it, and its threads, alive.
GroupRef: TypeAlias = "weakref.ref[dist.ProcessGroup]"
